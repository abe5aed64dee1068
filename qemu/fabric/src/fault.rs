// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What goes wrong on the wire, by seed.
//!
//! Every port has its own [`Line`] with its own random numbers, and every
//! frame draws the same count of them whatever faults are set. So what happens
//! to the n-th frame of a port depends on the seed, the port and n alone: a run
//! is repeatable although frames of different ports interleave freely, and
//! switching one fault on does not move the others.

use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Bytes that a line holds back at most, for delay, reordering and rate.
pub const LINE_LIMIT: usize = 8 * 1024 * 1024;
/// A reordered frame leaves after this time at the latest, in nanoseconds.
const REORDER_HOLD: u64 = 5_000_000;
/// A reordered frame is overtaken by one to this many later frames.
const REORDER_DEPTH: u64 = 4;
const NANOSECONDS: u128 = 1_000_000_000;
/// UDP destination port of RoCEv2.
const ROCE_PORT: u16 = 4791;

/// Which frames the faults apply to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Every frame.
    #[default]
    All,
    /// RoCEv2 frames over IPv4 or IPv6; everything else passes untouched.
    Roce,
}

/// The faults in force.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Probability that a frame is lost.
    pub loss: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that one bit of a frame is flipped.
    pub corrupt: f64,
    /// Probability that a frame is overtaken by later ones.
    pub reorder: f64,
    /// Delay of every frame in milliseconds.
    pub delay: f64,
    /// Bits per second that a port may send; zero means unlimited.
    pub rate: u64,
    /// The frames concerned.
    pub only: Scope,
}

impl Faults {
    /// Checks that the numbers mean something; the error names the bad one.
    pub fn check(&self) -> Result<(), String> {
        for (name, value) in [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("corrupt", self.corrupt),
            ("reorder", self.reorder),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return Err(format!("{name} is a probability from 0 to 1, not {value}"));
            }
        }
        if !(0.0..=60_000.0).contains(&self.delay) {
            return Err(format!(
                "delay is in milliseconds from 0 to 60000, not {}",
                self.delay
            ));
        }
        Ok(())
    }

    /// Whether frames pass at once and unchanged.
    pub fn none(&self) -> bool {
        self.loss == 0.0
            && self.duplicate == 0.0
            && self.corrupt == 0.0
            && self.reorder == 0.0
            && self.delay == 0.0
            && self.rate == 0
    }

    fn concerns(&self, frame: &[u8]) -> bool {
        match self.only {
            Scope::All => true,
            Scope::Roce => is_roce(frame),
        }
    }
}

/// What the faults did to the frames of one port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct FaultCounters {
    /// Frames lost.
    pub lost: u64,
    /// Frames delivered twice.
    pub duplicated: u64,
    /// Frames with a flipped bit.
    pub corrupted: u64,
    /// Frames held back behind later ones.
    pub reordered: u64,
    /// Frames given up because too much was held back already.
    pub overflowed: u64,
}

/// A small generator (splitmix64): good enough for faults, and the same
/// everywhere for ever, which a library's generator does not promise.
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        // The first outputs of near seeds are alike.
        random.next();
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// True with the given probability.
    fn chance(&mut self, probability: f64) -> bool {
        // 53 bits, so that the quotient is exact and below one.
        ((self.next() >> 11) as f64) / ((1u64 << 53) as f64) < probability
    }
}

/// A frame waiting for its time.
struct Waiting {
    due: u64,
    order: u64,
    frame: Vec<u8>,
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        (self.due, self.order) == (other.due, other.order)
    }
}
impl Eq for Waiting {}
impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.order).cmp(&(other.due, other.order))
    }
}

/// What a frame that is held back takes beside its bytes: the entry, and what
/// the allocator adds.
const OVERHEAD: usize = 96;

/// What a frame that is held back counts for.
fn cost(frame: &[u8]) -> usize {
    frame.len() + OVERHEAD
}

/// A frame that later ones must overtake first.
struct Held {
    after: u64,
    latest: u64,
    frame: Vec<u8>,
}

/// The wire from one port into the switch.
pub struct Line {
    random: Random,
    sent: u64,
    waiting: BinaryHeap<Reverse<Waiting>>,
    held: Vec<Held>,
    bytes: usize,
    limit: usize,
    free_at: u64,
    last_due: u64,
    order: u64,
    /// What happened so far.
    pub counters: FaultCounters,
}

impl Line {
    /// The line of port `port` in a run with `seed`.
    pub fn new(seed: u64, port: u64) -> Self {
        Self {
            random: Random::new(seed, port),
            sent: 0,
            waiting: BinaryHeap::new(),
            held: Vec::new(),
            bytes: 0,
            limit: LINE_LIMIT,
            free_at: 0,
            last_due: 0,
            order: 0,
            counters: FaultCounters::default(),
        }
    }

    /// Bytes that it holds back.
    pub fn held(&self) -> usize {
        self.bytes
    }

    /// Holds back at most so many bytes from now on.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit.min(LINE_LIMIT);
    }

    /// Puts a frame on the line at time `now`; `deliver` gets what arrives at once.
    pub fn send(
        &mut self,
        faults: &Faults,
        frame: &[u8],
        now: u64,
        deliver: &mut dyn FnMut(&[u8]),
    ) {
        if !faults.concerns(frame) {
            deliver(frame);
            return;
        }
        self.sent += 1;
        let lost = self.random.chance(faults.loss);
        let duplicated = self.random.chance(faults.duplicate);
        let corrupted = self.random.chance(faults.corrupt);
        let reordered = self.random.chance(faults.reorder);
        let bit = self.random.next();
        let depth = self.random.next() % REORDER_DEPTH + 1;
        if lost {
            self.counters.lost += 1;
        } else {
            let mut changed;
            let mut frame = frame;
            if corrupted {
                self.counters.corrupted += 1;
                changed = frame.to_vec();
                flip_bit(&mut changed, bit);
                frame = &changed;
            }
            if reordered {
                self.counters.reordered += 1;
                self.hold(frame, self.sent + depth, now + REORDER_HOLD);
            } else {
                self.depart(faults, frame, now, deliver);
            }
            if duplicated {
                self.counters.duplicated += 1;
                self.depart(faults, frame, now, deliver);
            }
        }
        self.release(faults, now, deliver);
    }

    /// Delivers the next of what is due at time `now`, and the few that others
    /// have overtaken; `true` if there is more.
    pub fn poll(&mut self, faults: &Faults, now: u64, deliver: &mut dyn FnMut(&[u8])) -> bool {
        self.release(faults, now, deliver);
        let is_due = |first: &Reverse<Waiting>| first.0.due <= now;
        if self.waiting.peek().is_some_and(is_due) {
            if let Some(Reverse(first)) = self.waiting.pop() {
                self.bytes -= cost(&first.frame);
                deliver(&first.frame);
            }
        }
        self.waiting.peek().is_some_and(is_due)
    }

    /// When [`Line::poll`] has something to do next.
    pub fn next_timeout(&self) -> Option<u64> {
        let waiting = self.waiting.peek().map(|Reverse(first)| first.due);
        let held = self.held.iter().map(|held| held.latest).min();
        waiting.into_iter().chain(held).min()
    }

    fn room(&mut self, length: usize) -> bool {
        if self.bytes + length > self.limit {
            self.counters.overflowed += 1;
            return false;
        }
        self.bytes += length;
        true
    }

    fn hold(&mut self, frame: &[u8], after: u64, latest: u64) {
        if self.room(cost(frame)) {
            self.held.push(Held {
                after,
                latest,
                frame: frame.to_vec(),
            });
        }
    }

    /// Moves on the held frames that enough others have overtaken.
    fn release(&mut self, faults: &Faults, now: u64, deliver: &mut dyn FnMut(&[u8])) {
        let mut index = 0;
        while index < self.held.len() {
            if self.held[index].after <= self.sent || self.held[index].latest <= now {
                let held = self.held.remove(index);
                self.bytes -= cost(&held.frame);
                self.depart(faults, &held.frame, now, deliver);
            } else {
                index += 1;
            }
        }
    }

    fn depart(&mut self, faults: &Faults, frame: &[u8], now: u64, deliver: &mut dyn FnMut(&[u8])) {
        let mut due = now;
        if faults.rate > 0 {
            let bits = frame.len() as u128 * 8;
            let takes = (bits * NANOSECONDS / u128::from(faults.rate)).min(u128::from(u32::MAX));
            self.free_at = self.free_at.max(now) + takes as u64;
            due = self.free_at;
        }
        due += (faults.delay * 1e6) as u64;
        // A wire is first in, first out, also when its delay shrinks.
        due = due.max(self.last_due);
        self.last_due = due;
        if due <= now && self.waiting.is_empty() {
            deliver(frame);
        } else if self.room(cost(frame)) {
            self.order += 1;
            self.waiting.push(Reverse(Waiting {
                due,
                order: self.order,
                frame: frame.to_vec(),
            }));
        }
    }
}

/// Flips one bit behind the Ethernet header.
///
/// A real wire's errors are caught by the Ethernet checksum, which these links
/// do not carry; one in the header would only misdirect the frame.
fn flip_bit(frame: &mut [u8], choice: u64) {
    let payload = frame.get_mut(14..).unwrap_or_default();
    let bits = payload.len() as u64 * 8;
    if bits > 0 {
        let bit = choice % bits;
        if let Some(byte) = payload.get_mut((bit / 8) as usize) {
            *byte ^= 1 << (bit % 8);
        }
    }
}

/// Whether the frame is UDP to the RoCEv2 port, with at most one VLAN tag.
pub fn is_roce(frame: &[u8]) -> bool {
    let be16 = |at: usize| {
        frame
            .get(at..at + 2)
            .map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    let mut at = 12;
    if be16(at) == Some(0x8100) {
        at += 4;
    }
    let ip = at + 2;
    let udp = match be16(at) {
        Some(0x0800) if frame.get(ip + 9) == Some(&17) => ip + usize::from(frame[ip] & 0x0f) * 4,
        Some(0x86dd) if frame.get(ip + 6) == Some(&17) => ip + 40,
        _ => return false,
    };
    be16(udp + 2) == Some(ROCE_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(number: u32) -> Vec<u8> {
        let mut frame = vec![0u8; 64];
        frame[20..24].copy_from_slice(&number.to_be_bytes());
        frame
    }

    fn number(frame: &[u8]) -> u32 {
        u32::from_be_bytes(frame[20..24].try_into().unwrap())
    }

    fn run(faults: &Faults, seed: u64, count: u32) -> (Vec<Vec<u8>>, FaultCounters) {
        let mut line = Line::new(seed, 3);
        let mut got = Vec::new();
        for n in 0..count {
            let now = u64::from(n) * 1000;
            while line.poll(faults, now, &mut |f| got.push(f.to_vec())) {}
            line.send(faults, &frame(n), now, &mut |f| got.push(f.to_vec()));
        }
        while let Some(due) = line.next_timeout() {
            while line.poll(faults, due, &mut |f| got.push(f.to_vec())) {}
        }
        assert_eq!(line.bytes, 0);
        (got, line.counters)
    }

    #[test]
    fn without_faults_frames_pass_in_order() {
        let (got, counters) = run(&Faults::default(), 1, 100);
        assert_eq!(counters, FaultCounters::default());
        assert!(got.iter().map(|f| number(f)).eq(0..100));
    }

    #[test]
    fn one_seed_gives_one_run_and_another_seed_another() {
        let faults = Faults {
            loss: 0.1,
            duplicate: 0.1,
            corrupt: 0.1,
            reorder: 0.1,
            delay: 0.5,
            ..Faults::default()
        };
        assert_eq!(run(&faults, 7, 1000), run(&faults, 7, 1000));
        assert_ne!(run(&faults, 7, 1000).0, run(&faults, 8, 1000).0);
    }

    #[test]
    fn each_fault_happens_about_as_often_as_asked() {
        let about = |count: u64| assert!((80..=320).contains(&count), "{count} of 1000");
        let mut faults = Faults {
            loss: 0.2,
            ..Faults::default()
        };
        let (got, counters) = run(&faults, 42, 1000);
        about(counters.lost);
        assert_eq!(got.len() as u64, 1000 - counters.lost);
        faults = Faults {
            duplicate: 0.2,
            ..Faults::default()
        };
        let (got, counters) = run(&faults, 42, 1000);
        about(counters.duplicated);
        assert_eq!(got.len() as u64, 1000 + counters.duplicated);
        faults = Faults {
            corrupt: 0.2,
            ..Faults::default()
        };
        let (got, counters) = run(&faults, 42, 1000);
        about(counters.corrupted);
        let wrong = got
            .iter()
            .enumerate()
            .filter(|(n, f)| **f != frame(*n as u32))
            .count();
        assert_eq!(wrong as u64, counters.corrupted);
    }

    #[test]
    fn loss_of_one_loses_all() {
        let faults = Faults {
            loss: 1.0,
            ..Faults::default()
        };
        assert!(run(&faults, 1, 100).0.is_empty());
    }

    #[test]
    fn reordering_loses_nothing_and_does_reorder() {
        let faults = Faults {
            reorder: 0.3,
            ..Faults::default()
        };
        let (got, counters) = run(&faults, 5, 1000);
        assert!(counters.reordered > 100);
        let mut numbers: Vec<u32> = got.iter().map(|f| number(f)).collect();
        assert!(numbers.windows(2).any(|pair| pair[0] > pair[1]));
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..1000));
    }

    #[test]
    fn delay_and_rate_set_the_time_of_arrival() {
        let faults = Faults {
            delay: 2.0,
            rate: 64 * 8 * 1000,
            ..Faults::default()
        };
        let mut line = Line::new(0, 0);
        let mut got = 0;
        line.send(&faults, &frame(0), 0, &mut |_| got += 1);
        line.send(&faults, &frame(1), 0, &mut |_| got += 1);
        assert_eq!(got, 0);
        assert_eq!(line.next_timeout(), Some(3_000_000));
        line.poll(&faults, 2_999_999, &mut |_| got += 1);
        assert_eq!(got, 0);
        line.poll(&faults, 3_000_000, &mut |_| got += 1);
        assert_eq!(got, 1);
        assert_eq!(line.next_timeout(), Some(4_000_000));
    }

    #[test]
    fn what_is_held_back_is_bounded() {
        let faults = Faults {
            delay: 1000.0,
            ..Faults::default()
        };
        let mut line = Line::new(0, 0);
        let big = vec![0u8; 16 * 1024];
        for _ in 0..2000 {
            line.send(&faults, &big, 0, &mut |_| {});
        }
        assert!(line.bytes <= LINE_LIMIT);
        let room = LINE_LIMIT / cost(&big);
        assert_eq!(line.counters.overflowed as usize, 2000 - room);
        // Small ones take more memory than they have bytes.
        let mut line = Line::new(0, 0);
        let small = [0u8; 14];
        let sent = LINE_LIMIT / small.len();
        for _ in 0..sent {
            line.send(&faults, &small, 0, &mut |_| {});
        }
        let entry = size_of::<Reverse<Waiting>>() + small.len();
        assert!(line.waiting.len() * entry <= LINE_LIMIT);
        assert!(entry <= cost(&small));
    }

    #[test]
    fn the_scope_spares_other_frames() {
        let faults = Faults {
            loss: 1.0,
            only: Scope::Roce,
            ..Faults::default()
        };
        assert_eq!(run(&faults, 1, 10).0.len(), 10);
        let mut roce = vec![0u8; 80];
        roce[12..14].copy_from_slice(&[0x08, 0x00]);
        roce[14] = 0x45;
        roce[23] = 17;
        roce[36..38].copy_from_slice(&ROCE_PORT.to_be_bytes());
        assert!(is_roce(&roce));
        let mut line = Line::new(0, 0);
        line.send(&faults, &roce, 0, &mut |_| panic!("not lost"));
        for length in 0..roce.len() {
            // No prefix of a frame may be read past its end.
            let _ = is_roce(&roce[..length]);
        }
    }

    #[test]
    fn bad_numbers_are_named() {
        let faults = Faults {
            reorder: 1.5,
            ..Faults::default()
        };
        assert!(faults.check().unwrap_err().contains("reorder"));
        let faults = Faults {
            delay: f64::NAN,
            ..Faults::default()
        };
        assert!(faults.check().unwrap_err().contains("delay"));
    }
}
