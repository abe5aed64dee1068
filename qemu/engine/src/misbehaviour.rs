// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A device that does not keep to its specification, by seed, to see what its driver does.
//!
//! Answers to commands and all other events can be late, lost, doubled or out of order; flushed
//! work requests can be forgotten; a reset can be slow or never end; and what the host
//! reads from the device (events, completions, replies to queries, registers, wake words) can be
//! nonsense. Commands on tags can be slow. The specification is kept wherever nothing
//! else is asked for: a late event is still written like any other.
//!
//! Each kind of thing has its own random numbers and draws the same count for each of them,
//! whatever the probabilities are. So what happens to the n-th answer depends on the seed and n
//! alone, and asking for one fault does not move the others.

use crate::core::Core;
use crate::memory::Host;
use ferrite_abi::{
    CompletionEntry, CompletionStatus, EventCode, EventEntry, Plain, ReceivedEntry,
    COMPLETION_VALID_OFFSET,
};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::mem::{offset_of, size_of};

/// Entries held back at most; beyond, they are lost.
const MAX_HELD: usize = 4096;
/// Control doorbells that are held back at most.
const MAX_HELD_DOORBELLS: usize = 4096;
/// An entry out of order is overtaken by one to this many later ones of its kind.
const REORDER_DEPTH: u64 = 4;
/// Most places of an entry or reply that are changed at once.
const MAX_PLACES: u64 = 4;
/// One in so many is nonsense throughout, not in some places.
const THROUGHOUT: u64 = 16;
const NANOSECONDS_PER_MS: f64 = 1e6;
/// The longest [`Misbehaviour::hold`].
const MAX_HOLD: f64 = 600_000.0;

/// What happens to entries of event queues, as probabilities from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Disorder {
    /// It is never written.
    pub drop: f64,
    /// It is written twice, the second time somewhat later.
    pub double: f64,
    /// Later ones of its kind are written first.
    pub reorder: f64,
    /// It is written late, by a random time up to [`Misbehaviour::hold`].
    pub delay: f64,
}

/// How a reset goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reset {
    /// At once, as it should.
    #[default]
    Prompt,
    /// After [`Misbehaviour::hold`]. Until then the device says that it is being reset, and yet
    /// everything goes on: commands are carried out, packets answered, completions and events
    /// written, so that it shows who does not wait for the end. One that keeps to the specification
    /// ignores doorbells meanwhile, and is done within [`crate::RESET_TIMEOUT`]; this one is not
    /// where `hold` is longer.
    Slow,
    /// Never: everything goes on.
    Never,
}

/// Where the host reads nonsense: as probabilities from 0 to 1, or how often it was given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nonsense<T = f64> {
    /// In the event that tells of a finished command.
    pub answers: T,
    /// In any other event.
    pub events: T,
    /// In the reply to a query: what the device can do, states, page faults, counters, the clock.
    pub replies: T,
    /// In a completion, and in the entry of a received frame; its phase is right.
    pub completions: T,
    /// In what a register reads as.
    pub registers: T,
    /// In the words of doorbell records, and of channels' records, that the device writes.
    pub records: T,
}

/// What a device does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Misbehaviour {
    /// Of the random numbers.
    pub seed: u64,
    /// The longest delay, and how long a slow reset takes, in milliseconds. It may be longer than
    /// the device says that a command or a reset takes.
    pub hold: f64,
    /// Answers to commands.
    pub answers: Disorder,
    /// All other events: completion, asynchronous and global ones.
    pub events: Disorder,
    /// Completions of flushed work requests are never written.
    pub lose_flushes: bool,
    /// `CONTROL_RESET`.
    pub reset: Reset,
    /// A function-level reset has no effect.
    pub ignore_function_reset: bool,
    /// What is read.
    pub nonsense: Nonsense,
    /// Commands on tags are carried out so many milliseconds after they were taken up. That is no
    /// more than slow, as long as it is less than the device says that a command takes; but nothing
    /// else is held up, so that it shows who waits for a pending tag.
    pub hold_tags: f64,
    /// The doorbell of the control queue takes so many milliseconds to get to the device, and nothing
    /// else does. No order of doorbells and memory is broken by that, so that it shows whether the
    /// device knows of commands by their record.
    pub hold_control: f64,
    /// `RegisterRegion` of so many bytes, and `AllocateTag` with room for as many in pages of 4 KiB, end with
    /// `NoResource`, however much there is: so what becomes of a tag whose registration fails is seen, after
    /// others were made. Zero for none.
    pub fail_length: u64,
    /// `AllocateTag` of a window ends with `NoResource`, likewise.
    pub fail_windows: bool,
    /// `ReleaseTag` ends with `NotFound`, as if there had been no such tag.
    pub deny_tags: bool,
}

impl Default for Misbehaviour {
    fn default() -> Self {
        Self {
            seed: 0,
            hold: 100.0,
            answers: Disorder::default(),
            events: Disorder::default(),
            lose_flushes: false,
            reset: Reset::default(),
            ignore_function_reset: false,
            nonsense: Nonsense::default(),
            hold_tags: 0.0,
            hold_control: 0.0,
            fail_length: 0,
            fail_windows: false,
            deny_tags: false,
        }
    }
}

impl Misbehaviour {
    /// Checks that the numbers mean something; the error names the bad one.
    pub fn check(&self) -> Result<(), String> {
        let Nonsense {
            answers,
            events,
            replies,
            completions,
            registers,
            records,
        } = self.nonsense;
        for (name, value) in [
            ("answers.drop", self.answers.drop),
            ("answers.double", self.answers.double),
            ("answers.reorder", self.answers.reorder),
            ("answers.delay", self.answers.delay),
            ("events.drop", self.events.drop),
            ("events.double", self.events.double),
            ("events.reorder", self.events.reorder),
            ("events.delay", self.events.delay),
            ("nonsense.answers", answers),
            ("nonsense.events", events),
            ("nonsense.replies", replies),
            ("nonsense.completions", completions),
            ("nonsense.registers", registers),
            ("nonsense.records", records),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return Err(format!("{name} is a probability from 0 to 1, not {value}"));
            }
        }
        for (name, value) in [
            ("hold", self.hold),
            ("hold_tags", self.hold_tags),
            ("hold_control", self.hold_control),
        ] {
            if !(0.0..=MAX_HOLD).contains(&value) {
                return Err(format!(
                    "{name} is in milliseconds from 0 to {MAX_HOLD}, not {value}"
                ));
            }
        }
        Ok(())
    }

    /// Whether nothing is wrong.
    pub fn is_good(&self) -> bool {
        *self
            == Self {
                seed: self.seed,
                hold: self.hold,
                ..Self::default()
            }
    }

    fn hold_ns(&self) -> u64 {
        (self.hold * NANOSECONDS_PER_MS) as u64
    }
}

/// What was done wrong so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Misdeeds {
    /// Answers and events never written.
    pub dropped: u64,
    /// Answers and events written twice.
    pub doubled: u64,
    /// Answers and events that later ones overtook.
    pub reordered: u64,
    /// Answers and events written late.
    pub delayed: u64,
    /// Completions of flushed work requests never written.
    pub flushes: u64,
    /// What was changed.
    pub nonsense: Nonsense<u64>,
    /// Resets that were slow or had no effect.
    pub resets: u64,
    /// Commands on tags that were carried out late.
    pub held_tags: u64,
    /// Doorbells of the control queue that came late.
    pub held_control: u64,
    /// Registrations and allocations that failed for nothing.
    pub failed_tags: u64,
    /// Releases that the device denied.
    pub denied_tags: u64,
}

/// A small generator (splitmix64), the same everywhere for ever, as in the fabric's faults.
#[derive(Clone, Debug)]
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

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// True with the given probability.
    fn chance(&mut self, probability: f64) -> bool {
        // 53 bits, so that the quotient is exact and below one.
        ((self.next() >> 11) as f64) / ((1u64 << 53) as f64) < probability
    }

    /// Another number in the place of `value`, of `bits` bits: an edge, a neighbour, a small or
    /// a wild one.
    fn vary(&mut self, value: u64, bits: u32) -> u64 {
        let choice = self.below(8);
        let wild = self.next();
        let bit = 1u64 << (wild % u64::from(bits));
        let varied = match choice {
            0 => 0,
            1 => u64::MAX,
            2 => value.wrapping_add(1),
            3 => value.wrapping_sub(1),
            4 => value ^ bit,
            5 => wild % 64,
            6 => bit,
            _ => wild,
        };
        varied & (u64::MAX >> (u64::BITS - bits))
    }

    /// Changes some of the naturally aligned numbers in `bytes`, or all of them.
    fn spoil(&mut self, bytes: &mut [u8]) {
        if self.below(THROUGHOUT) == 0 {
            bytes.fill_with(|| self.next() as u8);
            return;
        }
        for _ in 0..1 + self.below(MAX_PLACES) {
            let size = 1usize << self.below(4);
            let at = (self.below(bytes.len() as u64) as usize) & !(size - 1);
            let Some(place) = bytes.get_mut(at..at + size) else {
                continue;
            };
            let mut word = [0; 8];
            word[..size].copy_from_slice(place);
            let varied = self.vary(u64::from_le_bytes(word), size as u32 * 8);
            place.copy_from_slice(&varied.to_le_bytes()[..size]);
        }
    }
}

/// Things of one kind that may be nonsense.
#[derive(Debug)]
struct Spoiler(Random);

impl Spoiler {
    /// The numbers to spoil the next one with, if it is to be.
    fn next(&mut self, probability: f64) -> Option<Random> {
        let spoilt = self.0.chance(probability);
        let random = Random::new(self.0.next(), 0);
        spoilt.then_some(random)
    }
}

/// An entry that is written later.
#[derive(Debug)]
struct Held {
    /// When, at the latest.
    due: u64,
    /// Or as soon as so many of its kind have come.
    after: u64,
    eqn: u16,
    entry: EventEntry,
}

/// Entries of one kind, in disorder.
#[derive(Debug)]
struct Line {
    random: Random,
    nonsense: Spoiler,
    come: u64,
    held: Vec<Held>,
    /// Where its nonsense is counted.
    spoiled: fn(&mut Nonsense<u64>) -> &mut u64,
}

impl Line {
    fn new(seed: u64, stream: u64, spoiled: fn(&mut Nonsense<u64>) -> &mut u64) -> Self {
        Self {
            spoiled,
            random: Random::new(seed, stream),
            nonsense: Spoiler(Random::new(seed, stream + 1)),
            come: 0,
            held: Vec::new(),
        }
    }

    fn hold(&mut self, held: Held, misdeeds: &mut Misdeeds) {
        if self.held.len() < MAX_HELD {
            self.held.push(held);
        } else {
            misdeeds.dropped += 1;
        }
    }

    /// What is written of an entry now.
    fn pass(
        &mut self,
        rules: &Disorder,
        nonsense: f64,
        hold: u64,
        now: u64,
        mut next: (u16, EventEntry),
        misdeeds: &mut Misdeeds,
    ) -> Option<(u16, EventEntry)> {
        self.come += 1;
        let dropped = self.random.chance(rules.drop);
        let doubled = self.random.chance(rules.double);
        let reordered = self.random.chance(rules.reorder);
        let delayed = self.random.chance(rules.delay);
        let depth = 1 + self.random.below(REORDER_DEPTH);
        let delay = self.random.below(hold.saturating_add(1));
        let again = self.random.below(hold.saturating_add(1));
        if let Some(mut random) = self.nonsense.next(nonsense) {
            *(self.spoiled)(&mut misdeeds.nonsense) += 1;
            spoil_event(&mut next.1, &mut random);
        }
        let (eqn, entry) = next;
        let late = |due, after| Held {
            due: now.saturating_add(due),
            after,
            eqn,
            entry,
        };
        if doubled {
            misdeeds.doubled += 1;
            // Half of them at once, where they hit the same use of whatever they name.
            let due = if again % 2 == 0 { 0 } else { again };
            self.hold(late(due, u64::MAX), misdeeds);
        }
        if dropped {
            misdeeds.dropped += 1;
            return None;
        }
        if reordered {
            misdeeds.reordered += 1;
            self.hold(late(hold, self.come + depth), misdeeds);
            return None;
        }
        if delayed {
            misdeeds.delayed += 1;
            self.hold(late(delay, u64::MAX), misdeeds);
            return None;
        }
        Some(next)
    }

    /// Takes an entry whose time has come.
    fn take_due(&mut self, now: u64) -> Option<(u16, EventEntry)> {
        let come = self.come;
        let index = self
            .held
            .iter()
            .position(|held| held.due <= now || held.after <= come)?;
        let held = self.held.remove(index);
        Some((held.eqn, held.entry))
    }

    fn next_timeout(&self) -> Option<u64> {
        self.held.iter().map(|held| held.due).min()
    }
}

/// Changes what an event says.
fn spoil_event(entry: &mut EventEntry, random: &mut Random) {
    // Rarely the code, as most events with another are not looked at further.
    if random.below(4) == 0 {
        let known = EventCode::from_number(random.below(0x44) as u32);
        entry.code = match known {
            Some(code) => code.number(),
            None => random.vary(entry.code.into(), 32) as u32,
        };
    }
    random.spoil(&mut entry.as_bytes_mut()[offset_of!(EventEntry, id)..]);
}

/// Numbers of the streams of random numbers; those of lines use the next one too.
mod stream {
    pub const ANSWERS: u64 = 1;
    pub const EVENTS: u64 = 3;
    pub const REPLIES: u64 = 5;
    pub const COMPLETIONS: u64 = 6;
    pub const REGISTERS: u64 = 7;
    pub const RECORDS: u64 = 8;
}

/// A misbehaving device's state.
#[derive(Debug)]
pub(crate) struct Misbehaving {
    rules: Misbehaviour,
    answers: Line,
    events: Line,
    replies: Spoiler,
    completions: Spoiler,
    registers: Spoiler,
    records: Spoiler,
    /// Doorbells of the control queue that are on their way: when each comes, and its index.
    control: VecDeque<(u64, u32)>,
    /// When a slow reset ends.
    reset_at: Option<u64>,
    misdeeds: Misdeeds,
}

impl Misbehaving {
    fn new(rules: Misbehaviour) -> Self {
        let seed = rules.seed;
        let spoiler = |stream| Spoiler(Random::new(seed, stream));
        Self {
            rules,
            answers: Line::new(seed, stream::ANSWERS, |counts| &mut counts.answers),
            events: Line::new(seed, stream::EVENTS, |counts| &mut counts.events),
            replies: spoiler(stream::REPLIES),
            completions: spoiler(stream::COMPLETIONS),
            registers: spoiler(stream::REGISTERS),
            records: spoiler(stream::RECORDS),
            control: VecDeque::new(),
            reset_at: None,
            misdeeds: Misdeeds::default(),
        }
    }

    /// The device was reset: its queues are gone.
    pub(crate) fn was_reset(&mut self) {
        self.answers.held.clear();
        self.events.held.clear();
        self.control.clear();
        self.reset_at = None;
    }

    /// How long after it was taken up a command on a tag is carried out, in nanoseconds.
    pub(crate) fn holds_tags(&self) -> u64 {
        (self.rules.hold_tags * NANOSECONDS_PER_MS) as u64
    }

    /// A command on a tag was carried out.
    pub(crate) fn held_tag(&mut self) {
        self.misdeeds.held_tags += u64::from(self.rules.hold_tags > 0.0);
    }

    /// Whether a registration or allocation of so many bytes fails for nothing.
    pub(crate) fn fails_tag(&mut self, length: u64) -> bool {
        self.fails(length != 0 && length == self.rules.fail_length)
    }

    /// Whether the allocation of a window does.
    pub(crate) fn fails_window(&mut self) -> bool {
        self.fails(self.rules.fail_windows)
    }

    /// Whether it says of a tag that was released that there was none.
    pub(crate) fn denies_tag(&mut self) -> bool {
        self.misdeeds.denied_tags += u64::from(self.rules.deny_tags);
        self.rules.deny_tags
    }

    fn fails(&mut self, fails: bool) -> bool {
        self.misdeeds.failed_tags += u64::from(fails);
        fails
    }

    /// The doorbell of the control queue was written; returns whether it is held back. None overtakes
    /// another.
    pub(crate) fn hold_control(&mut self, producer: u32, now: u64) -> bool {
        let hold = (self.rules.hold_control * NANOSECONDS_PER_MS) as u64;
        if hold == 0 && self.control.is_empty() {
            return false;
        }
        if self.control.len() >= MAX_HELD_DOORBELLS {
            // A later one says what those before it do.
            self.control.pop_back();
        }
        self.control.push_back((now.saturating_add(hold), producer));
        self.misdeeds.held_control += 1;
        true
    }

    /// Takes the next doorbell that is due.
    pub(crate) fn held_doorbell(&mut self, now: u64) -> Option<u32> {
        let due = self.control.front().is_some_and(|(due, _)| *due <= now);
        let next = if due { self.control.pop_front() } else { None };
        next.map(|(_, producer)| producer)
    }

    /// `CONTROL_RESET` was written; returns whether the device is to be reset now.
    pub(crate) fn reset_now(&mut self, now: u64) -> bool {
        match self.rules.reset {
            Reset::Prompt => return true,
            Reset::Slow => {
                let end = now.saturating_add(self.rules.hold_ns());
                self.reset_at.get_or_insert(end);
            }
            Reset::Never => {}
        }
        self.misdeeds.resets += 1;
        false
    }

    /// Whether a slow reset is under way.
    pub(crate) fn is_resetting(&self) -> bool {
        self.reset_at.is_some()
    }

    /// Whether a slow reset has come to its end.
    pub(crate) fn reset_due(&self, now: u64) -> bool {
        self.reset_at.is_some_and(|end| end <= now)
    }

    /// A function-level reset was asked for; returns whether it has an effect.
    pub(crate) fn takes_function_reset(&mut self) -> bool {
        if self.rules.ignore_function_reset {
            self.misdeeds.resets += 1;
        }
        !self.rules.ignore_function_reset
    }

    /// When something that was held back is due.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        let lines = [self.answers.next_timeout(), self.events.next_timeout()];
        let doorbell = self.control.front().map(|(due, _)| *due);
        let lines = lines.into_iter().flatten();
        lines.chain(doorbell).chain(self.reset_at).min()
    }

    fn pass(&mut self, eqn: u16, entry: EventEntry, now: u64) -> Option<(u16, EventEntry)> {
        let rules = &self.rules;
        let (line, disorder, nonsense) = if entry.code == EventCode::CommandDone.number() {
            (&mut self.answers, &rules.answers, rules.nonsense.answers)
        } else {
            (&mut self.events, &rules.events, rules.nonsense.events)
        };
        let (hold, next) = (rules.hold_ns(), (eqn, entry));
        line.pass(disorder, nonsense, hold, now, next, &mut self.misdeeds)
    }

    fn take_due(&mut self, now: u64) -> Option<(u16, EventEntry)> {
        self.answers
            .take_due(now)
            .or_else(|| self.events.take_due(now))
    }

    /// Changes the reply to a query, perhaps.
    pub(crate) fn spoil_reply(&mut self, bytes: &mut [u8]) {
        if let Some(mut random) = self.replies.next(self.rules.nonsense.replies) {
            self.misdeeds.nonsense.replies += 1;
            // The host reads at most this far; what follows is reserved in every reply.
            let used = bytes.len().min(REPLY_USED);
            random.spoil(&mut bytes[..used]);
        }
    }

    /// Whether a completion is never written.
    pub(crate) fn loses(&mut self, entry: &CompletionEntry) -> bool {
        let lost = self.rules.lose_flushes && entry.status == CompletionStatus::Flushed.number();
        if lost {
            self.misdeeds.flushes += 1;
        }
        lost
    }

    /// Changes a completion, perhaps.
    pub(crate) fn spoil_completion(&mut self, entry: &mut CompletionEntry) {
        if let Some(mut random) = self.completions.next(self.rules.nonsense.completions) {
            self.misdeeds.nonsense.completions += 1;
            let bytes = entry.as_bytes_mut();
            // The word that makes it valid as often as all the others.
            if random.below(2) == 0 {
                random.spoil(&mut bytes[COMPLETION_VALID_OFFSET..]);
            } else {
                random.spoil(bytes);
            }
        }
    }

    /// Changes what is told of a received frame, perhaps.
    pub(crate) fn spoil_received(&mut self, entry: &mut ReceivedEntry) {
        if let Some(mut random) = self.completions.next(self.rules.nonsense.completions) {
            self.misdeeds.nonsense.completions += 1;
            random.spoil(entry.as_bytes_mut());
        }
    }

    /// What is put into a record in place of a word, perhaps.
    pub(crate) fn record_word(&mut self, value: u32) -> u32 {
        match self.records.next(self.rules.nonsense.records) {
            Some(mut random) => {
                self.misdeeds.nonsense.records += 1;
                random.vary(value.into(), 32) as u32
            }
            None => value,
        }
    }

    /// What a register reads as.
    pub(crate) fn spoil_register(&mut self, value: u64, size: usize) -> u64 {
        match self.registers.next(self.rules.nonsense.registers) {
            Some(mut random) if matches!(size, 1 | 2 | 4 | 8) => {
                self.misdeeds.nonsense.registers += 1;
                random.vary(value, size as u32 * 8)
            }
            _ => value,
        }
    }

    /// A word to put into a doorbell record, perhaps.
    pub(crate) fn wake_word(&mut self) -> Option<u32> {
        let mut random = self.records.next(self.rules.nonsense.records)?;
        self.misdeeds.nonsense.records += 1;
        Some(random.vary(0, 32) as u32)
    }
}

/// Bytes of a reply that mean something: those of `PageFaults`, the longest.
const REPLY_USED: usize = size_of::<ferrite_abi::PageFaults>();

impl Core {
    /// Sets what the device does wrong from now on; `rules` were checked. What the last ones held
    /// back is written now.
    pub(crate) fn misbehave(&mut self, rules: Misbehaviour, host: &mut dyn Host) {
        if let Some(old) = self.misbehaviour.take() {
            let Misbehaving {
                answers, events, ..
            } = *old;
            for held in answers.held.into_iter().chain(events.held) {
                self.write_late_event(held.eqn, held.entry, host);
            }
        }
        if !rules.is_good() {
            self.misbehaviour = Some(Box::new(Misbehaving::new(rules)));
        }
    }

    /// What the device does wrong, and what it did; none where it behaves.
    pub fn misdeeds(&self) -> Option<(&Misbehaviour, &Misdeeds)> {
        self.misbehaviour
            .as_deref()
            .map(|misbehaving| (&misbehaving.rules, &misbehaving.misdeeds))
    }

    /// The event that is written, if any, in the place of `entry`, which belongs in queue `eqn`;
    /// none where [`Core::write_late_events`] writes it, or nobody.
    pub(crate) fn event_to_write(&mut self, eqn: u16, entry: EventEntry) -> Option<EventEntry> {
        let now = self.now;
        match &mut self.misbehaviour {
            None => Some(entry),
            Some(misbehaving) => misbehaving.pass(eqn, entry, now).map(|(_, entry)| entry),
        }
    }

    /// Writes the events whose time has come.
    pub(crate) fn write_late_events(&mut self, host: &mut dyn Host) {
        // Each of them is written once, and none is held back again.
        while let Some((eqn, entry)) = self
            .misbehaviour
            .as_mut()
            .and_then(|misbehaving| misbehaving.take_due(self.now))
        {
            self.write_late_event(eqn, entry, host);
        }
    }
}

#[cfg(test)]
mod tests;
