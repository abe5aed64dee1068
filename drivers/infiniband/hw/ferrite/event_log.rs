// SPDX-License-Identifier: GPL-2.0

//! The last events of a function: what its device said, which commands it refused, and what became of it. They are kept
//! from one life to the next, for who looks after a failure ([`dump`](crate::recovery)).
//!
//! What is work is not here, as there is much of it: completions, frames, page faults, commands that were done. The rest
//! is rare, and is noted by whoever meets with it, in an interrupt or not, without a lock: a line of the cache of its own
//! for each entry, and a counter. What a user can bring about as often as he likes, by the objects that he has, is in a
//! ring of its own: it drives out nothing of the device as a whole.
//!
//! It is for people, and may go in a report to others. So nothing is noted that could be a key or lead to one, nor any
//! address: of what an event says only what is known to be neither.

use crate::{
    abi::{
        CommandOpcode,
        CommandStatus,
        EventCode,
        EventEntry,
        FatalCode,
        Management,
        MEMORY_ERRORS_UNTOLD, //
    },
    hardware::Cause, //
};
use kernel::{
    fmt,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full,
            Relaxed,
            Release, //
        },
        barrier::smp_rmb, //
    },
    time::{
        Instant,
        Monotonic, //
    }, //
};

/// Entries of each ring.
const ENTRIES: usize = 64;

/// What became of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The life of that number begins.
    Begins(u32),
    /// None did, by that error.
    NotBegun(Error),
    /// It was given up.
    Failed(Cause),
    /// It was, and leaves memory alone from then on.
    Stopped,
    /// It was, and cannot be stopped.
    Unstoppable,
    /// A life that had not failed ended.
    Ended,
    /// It is not tried again by itself.
    LeftAlone,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happening {
    /// The device raised an event by an event queue.
    Event {
        /// [`EventCode`], or any other number that it wrote.
        code: u32,
        queue: u16,
        /// What it is about, and what it says: by code, zero where that is nobody's.
        number: u32,
        detail: u32,
    },
    /// It answered a command with this status, which is no success.
    Refused { opcode: u16, status: u32 },
    /// Something became of it.
    Change(Change),
}

impl Happening {
    /// What is noted of an event of `queue`.
    fn of_event(event: &EventEntry, queue: u16) -> Self {
        use EventCode::*;
        let (number, detail) = match EventCode::from_number(event.code) {
            // Numbers of objects are no secret (`rdma resource`), nor are those of ports and channels.
            Some(
                CompletionQueueError
                | QueuePairFatal
                | QueuePairRequestError
                | QueuePairAccessError
                | CommunicationEstablished
                | SendQueueDrained
                | LastWqeReached
                | SrqLimit
                | SrqError
                | EventQueueOverflow
                | ChannelPoolLow
                | ChannelBadBuffers
                | ManagementAction,
            ) => (event.id, 0),
            Some(LinkChange) => (event.id, u32::from(event.param0 != 0)),
            Some(DeviceFatal) => (0, u32::from(event.param0 as u8)),
            // Not where: one of them says it by an address of the bus.
            Some(MemoryErrorInternal | MemoryErrorExternal) => {
                (0, (event.param1 >> MEMORY_ERRORS_UNTOLD) as u32)
            }
            // Of an answer that nobody asked for, or an event that nobody knows, anything may be in there.
            Some(CommandDone | Completion | PageFaults | ChannelPackets | ChannelDescriptors)
            | None => (0, 0),
        };
        Self::Event {
            code: event.code,
            queue,
            number,
            detail,
        }
    }

    /// Whether it is about the device as a whole, and so nothing that a user brings about.
    fn is_of_the_device(&self) -> bool {
        match self {
            Self::Event { code, .. } => matches!(
                EventCode::from_number(*code),
                Some(
                    EventCode::LinkChange
                        | EventCode::DeviceFatal
                        | EventCode::MemoryErrorInternal
                        | EventCode::MemoryErrorExternal
                        | EventCode::ManagementAction
                )
            ),
            Self::Refused { .. } => false,
            Self::Change(_) => true,
        }
    }

    /// As it is kept: what it is in the first of the words, in its low byte, and what there is to say of it.
    fn words(self) -> Words {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        match self {
            Self::Event {
                code,
                queue,
                number,
                detail,
            } => [pair(u32::from(queue) << 8, code), pair(number, detail)],
            Self::Refused { opcode, status } => [1, pair(opcode.into(), status)],
            Self::Change(change) => {
                let (what, detail) = match change {
                    Change::Begins(life) => (2, life),
                    Change::NotBegun(error) => (3, error.to_errno().unsigned_abs()),
                    Change::Failed(cause) => (4, cause.number()),
                    Change::Stopped => (5, 0),
                    Change::Unstoppable => (6, 0),
                    Change::Ended => (7, 0),
                    Change::LeftAlone => (8, 0),
                };
                [what, pair(0, detail)]
            }
        }
    }

    /// What was kept as `words`.
    fn from_words([what, said]: Words) -> Option<Self> {
        let (number, detail) = (said as u32, (said >> 32) as u32);
        let change = match what as u8 {
            0 => {
                return Some(Self::Event {
                    code: (what >> 32) as u32,
                    queue: (what >> 8) as u16,
                    number,
                    detail,
                })
            }
            1 => {
                return Some(Self::Refused {
                    opcode: number as u16,
                    status: detail,
                })
            }
            2 => Change::Begins(detail),
            3 => Change::NotBegun(Error::from_errno(-(detail as i32))),
            4 => Change::Failed(Cause::from_number(detail)?),
            5 => Change::Stopped,
            6 => Change::Unstoppable,
            7 => Change::Ended,
            8 => Change::LeftAlone,
            _ => return None,
        };
        Some(Self::Change(change))
    }
}

impl fmt::Display for Happening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Event {
                code,
                queue,
                number,
                detail,
            } => {
                let Some(known) = EventCode::from_number(*code) else {
                    return write!(f, "event {code:#x} by queue {queue}");
                };
                write!(f, "event {known:?} by queue {queue}")?;
                match known {
                    EventCode::DeviceFatal => match FatalCode::from_number(*detail as u8) {
                        Some(why) => write!(f, ": {why:?}"),
                        None => write!(f, ": {detail:#x}"),
                    },
                    EventCode::LinkChange => {
                        let to = if *detail == 0 { "down" } else { "up" };
                        write!(f, ": port {number} {to}")
                    }
                    EventCode::MemoryErrorInternal | EventCode::MemoryErrorExternal => {
                        write!(f, ": and {detail} before it")
                    }
                    EventCode::ManagementAction => match Management::from_number(*number) {
                        Some(action) => write!(f, ": {action:?}"),
                        None => write!(f, ": {number:#x}"),
                    },
                    EventCode::CommandDone => write!(f, ": not asked for"),
                    _ => write!(f, ": number {number}"),
                }
            }
            Self::Refused { opcode, status } => {
                f.write_str("command ")?;
                fmt::Display::fmt(&Opcode(*opcode), f)?;
                f.write_str(": ")?;
                match u8::try_from(*status)
                    .ok()
                    .and_then(CommandStatus::from_number)
                {
                    Some(status) => write!(f, "{status:?}"),
                    None => write!(f, "status {status:#x}"),
                }
            }
            Self::Change(change) => match change {
                Change::Begins(life) => write!(f, "life {life} begins"),
                Change::NotBegun(error) => {
                    write!(f, "no life began: error {}", -error.to_errno())
                }
                Change::Failed(cause) => {
                    write!(f, "given up: {}", cause.text().to_str().unwrap_or("?"))
                }
                Change::Stopped => f.write_str("stopped"),
                Change::Unstoppable => f.write_str("cannot be stopped"),
                Change::Ended => f.write_str("life ended"),
                Change::LeftAlone => f.write_str("left alone"),
            },
        }
    }
}

/// The name of a command, where it has one.
pub(crate) struct Opcode(pub(crate) u16);

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match CommandOpcode::from_number(self.0) {
            Some(opcode) => write!(f, "{opcode:?}"),
            None => write!(f, "{:#x}", self.0),
        }
    }
}

/// An entry as it is kept, but for its time.
type Words = [u64; 2];

/// Room for an entry: a line of the cache, so that who notes something disturbs nobody who notes something else.
#[repr(align(64))]
struct Slot {
    /// Whose it is: nobody's (zero), being written for an entry ([`Ring::begun`]), or that entry's ([`Ring::done`]).
    turn: Atomic<u64>,
    time: Atomic<u64>,
    words: [Atomic<u64>; 2],
}

/// The last [`ENTRIES`] of many entries.
///
/// An entry has a number, which is one more than that of the one before, and by that a slot. Whoever has changed the
/// turn of that from what is complete to [`Self::begun`] of his number is the only one who writes to it, until he has
/// changed it to [`Self::done`]; nobody waits for him. Who finds that another one writes there, or that an entry is
/// there that is later than his, drops his own and counts it: for that, as many others as there are slots must have
/// come in the middle of a few stores. Who reads takes nothing, and looks at the turn before and after: an entry that
/// was being written meanwhile is not one that he gives. So what is read is always one entry as it was noted; all
/// accesses are atomic, so that there is nothing else to keep.
struct Ring {
    slots: KVec<Slot>,
    /// The number of the next entry.
    next: Atomic<u64>,
    lost: Atomic<u32>,
}

/// Somebody's slot, until he has written to it.
struct Writing<'a> {
    slot: &'a Slot,
    number: u64,
}

impl Writing<'_> {
    fn end(self, time: u64, words: Words) {
        self.slot.time.store(time, Relaxed);
        for (to, word) in self.slot.words.iter().zip(words) {
            to.store(word, Relaxed);
        }
        // Who sees this sees the rest.
        self.slot.turn.store(Ring::done(self.number), Release);
    }
}

impl Ring {
    fn new() -> Result<Self> {
        let mut slots = KVec::with_capacity(ENTRIES, GFP_KERNEL)?;
        for _ in 0..ENTRIES {
            let slot = Slot {
                turn: Atomic::new(0),
                time: Atomic::new(0),
                words: [const { Atomic::new(0) }; 2],
            };
            slots.push(slot, GFP_KERNEL)?;
        }
        Ok(Self {
            slots,
            next: Atomic::new(0),
            lost: Atomic::new(0),
        })
    }

    const fn begun(number: u64) -> u64 {
        2 * number + 1
    }

    const fn done(number: u64) -> u64 {
        2 * number + 2
    }

    fn slot(&self, number: u64) -> Option<&Slot> {
        self.slots.get(number as usize % ENTRIES)
    }

    /// Takes the slot of the entry of that number, unless another one has it.
    fn begin(&self, number: u64) -> Option<Writing<'_>> {
        let slot = self.slot(number)?;
        let seen = slot.turn.load(Relaxed);
        if seen % 2 != 0 || seen > Self::begun(number) {
            return None;
        }
        // With all that it stores after this: who sees that sees this too.
        slot.turn.cmpxchg(seen, Self::begun(number), Full).ok()?;
        Some(Writing { slot, number })
    }

    /// Notes something. May be called from any context but that of an NMI.
    fn note(&self, time: u64, words: Words) {
        let number = self.next.fetch_add(1, Relaxed);
        match self.begin(number) {
            Some(writing) => writing.end(time, words),
            None => {
                self.lost.fetch_add(1, Relaxed);
            }
        }
    }

    /// The entry of that number, if it is there.
    fn get(&self, number: u64) -> Option<(u64, Words)> {
        let slot = self.slot(number)?;
        if slot.turn.load(Acquire) != Self::done(number) {
            return None;
        }
        let time = slot.time.load(Relaxed);
        let words = [slot.words[0].load(Relaxed), slot.words[1].load(Relaxed)];
        // Whoever has written any of that since has changed the turn before.
        smp_rmb();
        (slot.turn.load(Relaxed) == Self::done(number)).then_some((time, words))
    }

    /// What there is, in the order in which it was noted.
    fn entries(&self) -> impl Iterator<Item = (u64, Words)> + '_ {
        let next = self.next.load(Relaxed);
        let first = next.saturating_sub(ENTRIES as u64);
        (first..next).filter_map(|number| self.get(number))
    }
}

/// The last events of a function.
pub(crate) struct EventLog {
    /// What times count from.
    epoch: Instant<Monotonic>,
    of_the_device: Ring,
    of_objects: Ring,
}

impl EventLog {
    /// With nothing in it.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            epoch: Instant::now(),
            of_the_device: Ring::new()?,
            of_objects: Ring::new()?,
        })
    }

    /// Nanoseconds since it was made.
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    #[cold]
    fn note(&self, what: Happening) {
        let ring = if what.is_of_the_device() {
            &self.of_the_device
        } else {
            &self.of_objects
        };
        ring.note(self.now(), what.words());
    }

    /// Notes an event that came by `queue`. May be called in interrupt context.
    pub(crate) fn event(&self, event: &EventEntry, queue: u16) {
        self.note(Happening::of_event(event, queue));
    }

    /// Notes that the device refused a command. May be called in interrupt context.
    pub(crate) fn refused(&self, opcode: u16, status: u32) {
        self.note(Happening::Refused { opcode, status });
    }

    /// Notes what became of the device. May be called in interrupt context.
    pub(crate) fn change(&self, change: Change) {
        self.note(Happening::Change(change));
    }

    /// How many were dropped, as they came too fast.
    pub(crate) fn lost(&self) -> u32 {
        let [one, other] =
            [&self.of_the_device, &self.of_objects].map(|ring| ring.lost.load(Relaxed));
        one.saturating_add(other)
    }

    /// What there is, in the order in which it was, each with how many microseconds ago. Sleeps.
    pub(crate) fn last(&self) -> Result<KVec<(u64, Happening)>> {
        let now = self.now();
        let mut last = KVec::with_capacity(2 * ENTRIES, GFP_KERNEL)?;
        for (time, words) in merged(self.of_the_device.entries(), self.of_objects.entries()) {
            if let Some(what) = Happening::from_words(words) {
                last.push((now.saturating_sub(time) / 1000, what), GFP_KERNEL)?;
            }
        }
        Ok(last)
    }
}

/// What two iterators give that are each in the order of time, in that order.
fn merged<T>(
    one: impl Iterator<Item = (u64, T)>,
    other: impl Iterator<Item = (u64, T)>,
) -> impl Iterator<Item = (u64, T)> {
    let (mut one, mut other) = (one.peekable(), other.peekable());
    core::iter::from_fn(move || match (one.peek(), other.peek()) {
        (Some((first, _)), Some((second, _))) if first <= second => one.next(),
        (_, Some(_)) => other.next(),
        (_, None) => one.next(),
    })
}

#[kunit_tests(ferrite_event_log)]
mod tests {
    use super::*;
    use crate::abi::Plain;
    use kernel::str::CString;

    fn event(code: EventCode, id: u32, param0: u64, param1: u64) -> EventEntry {
        EventEntry {
            code: code.number(),
            id,
            param0,
            param1,
            ..EventEntry::zeroed()
        }
    }

    /// What is said of something once it was kept.
    fn said(what: Happening) -> Result<CString> {
        let kept = Happening::from_words(what.words()).ok_or(EINVAL)?;
        assert_eq!(kept, what);
        CString::try_from_fmt(fmt!("{}", kept))
    }

    fn said_of(event: EventEntry) -> Result<CString> {
        said(Happening::of_event(&event, 1))
    }

    #[test]
    fn what_happened_is_said_as_it_was_noted() -> Result {
        for (what, expected) in [
            (Happening::Change(Change::Begins(3)), c"life 3 begins"),
            (
                Happening::Change(Change::NotBegun(EIO)),
                c"no life began: error 5",
            ),
            (
                Happening::Change(Change::Failed(Cause::Silent)),
                c"given up: the device did not answer a command",
            ),
            (
                Happening::Change(Change::Failed(Cause::Stopped(Some(FatalCode::Injected)))),
                c"given up: the device stopped itself",
            ),
            (Happening::Change(Change::Stopped), c"stopped"),
            (Happening::Change(Change::Unstoppable), c"cannot be stopped"),
            (Happening::Change(Change::Ended), c"life ended"),
            (Happening::Change(Change::LeftAlone), c"left alone"),
            (
                Happening::Refused {
                    opcode: CommandOpcode::Nop.number(),
                    status: CommandStatus::Busy.number().into(),
                },
                c"command Nop: Busy",
            ),
            (
                Happening::Refused {
                    opcode: 0xfff0,
                    status: 0x100,
                },
                c"command 0xfff0: status 0x100",
            ),
        ] {
            assert_eq!(said(what)?.to_bytes(), expected.to_bytes());
        }
        for (event, expected) in [
            (
                event(EventCode::DeviceFatal, 0, 7, 0),
                c"event DeviceFatal by queue 1: Injected",
            ),
            (
                event(EventCode::LinkChange, 0, 1, 0),
                c"event LinkChange by queue 1: port 0 up",
            ),
            (
                event(EventCode::QueuePairFatal, 0x12, 0, 0),
                c"event QueuePairFatal by queue 1: number 18",
            ),
            (
                event(EventCode::ManagementAction, 1, 0, 0),
                c"event ManagementAction by queue 1: Cable",
            ),
        ] {
            assert_eq!(said_of(event)?.to_bytes(), expected.to_bytes());
        }
        Ok(())
    }

    #[test]
    fn what_could_be_a_key_or_an_address_is_not_noted() -> Result {
        const SECRET: u64 = 0x5ec2_e7a1;
        let hidden = |event| -> Result<bool> {
            let kept = Happening::of_event(&event, 1);
            let [what, said] = kept.words();
            let in_words = [what, what >> 32, said, said >> 32];
            Ok(in_words.iter().all(|word| *word as u32 != SECRET as u32))
        };
        let codes = (0..=0xff).map(EventCode::from_number);
        for code in codes.flatten() {
            let of_event = event(code, 3, SECRET, SECRET);
            // Of a fatal stop there is a byte.
            assert!(hidden(of_event)?);
        }
        // Nor is anything of what is not known, or was not asked for.
        for code in [0x99, u32::MAX, EventCode::CommandDone.number()] {
            let unknown = EventEntry {
                code,
                id: SECRET as u32,
                param0: SECRET,
                param1: SECRET,
                ..EventEntry::zeroed()
            };
            assert!(hidden(unknown)?);
        }
        Ok(())
    }

    /// What a ring has.
    fn kept(ring: &Ring) -> Result<KVec<u64>> {
        let mut kept = KVec::new();
        for (time, [first, second]) in ring.entries() {
            // All of an entry is of one.
            assert_eq!((first, second), (time + 1, time + 2));
            kept.push(time, GFP_KERNEL)?;
        }
        Ok(kept)
    }

    fn note(ring: &Ring, time: u64) {
        ring.note(time, [time + 1, time + 2]);
    }

    #[test]
    fn the_last_entries_are_there_in_their_order() -> Result {
        let ring = Ring::new()?;
        assert!(kept(&ring)?.is_empty());
        for count in 1..=3 * ENTRIES as u64 {
            note(&ring, count);
            let kept = kept(&ring)?;
            let first = count.saturating_sub(ENTRIES as u64) + 1;
            assert!(kept.iter().copied().eq(first..=count));
        }
        assert_eq!(ring.lost.load(Relaxed), 0);
        Ok(())
    }

    #[test]
    fn who_is_slow_has_his_slot_to_himself_and_nobody_waits_for_him() -> Result {
        let ring = Ring::new()?;
        // As an interrupt that comes in the middle of a note.
        let number = ring.next.fetch_add(1, Relaxed);
        let slow = ring.begin(number).ok_or(EINVAL)?;
        slow.slot.time.store(1000, Relaxed);
        for count in 1..ENTRIES as u64 {
            note(&ring, count);
        }
        assert!(kept(&ring)?.iter().copied().eq(1..ENTRIES as u64));
        // This one finds him there.
        note(&ring, 500);
        assert_eq!(ring.lost.load(Relaxed), 1);
        note(&ring, 501);
        slow.end(0, [1, 2]);
        // What he wrote is older than what there is.
        let kept = kept(&ring)?;
        let (last, before) = kept.split_last().ok_or(EINVAL)?;
        assert!(before.iter().copied().eq(2..ENTRIES as u64));
        assert_eq!(*last, 501);
        Ok(())
    }

    #[test]
    fn who_is_overtaken_writes_nothing() -> Result {
        let ring = Ring::new()?;
        let number = ring.next.fetch_add(1, Relaxed);
        for count in 1..=ENTRIES as u64 {
            note(&ring, count);
        }
        assert!(ring.begin(number).is_none());
        assert!(kept(&ring)?.iter().copied().eq(1..=ENTRIES as u64));
        Ok(())
    }

    #[test]
    fn what_is_read_while_it_is_written_is_not_given() -> Result {
        let ring = Ring::new()?;
        note(&ring, 7);
        let next = ENTRIES as u64;
        ring.next.store(next, Relaxed);
        let writing = ring.begin(next).ok_or(EINVAL)?;
        assert!(ring.get(0).is_none() && ring.get(next).is_none());
        writing.end(8, [9, 10]);
        assert!(ring.get(0).is_none());
        assert_eq!(ring.get(next), Some((8, [9, 10])));
        Ok(())
    }

    #[test]
    fn no_event_of_a_user_drives_out_one_of_the_device() -> Result {
        let log = EventLog::new()?;
        log.change(Change::Begins(1));
        log.event(&event(EventCode::DeviceFatal, 0, 7, 0), 1);
        for number in 0..2 * ENTRIES as u32 {
            log.event(&event(EventCode::SrqLimit, number, 0, 0), 1);
            log.refused(CommandOpcode::Nop.number(), 6);
        }
        log.change(Change::Failed(Cause::Stopped(Some(FatalCode::Injected))));
        let last = log.last()?;
        assert_eq!(last.len(), ENTRIES + 3);
        let is_event = |what: &Happening, wanted: EventCode| matches!(what, Happening::Event { code, .. } if *code == wanted.number());
        // In the order in which they were noted.
        assert_eq!(last[0].1, Happening::Change(Change::Begins(1)));
        assert!(is_event(&last[1].1, EventCode::DeviceFatal));
        assert!(is_event(&last[2].1, EventCode::SrqLimit));
        assert!(matches!(
            last[ENTRIES + 2].1,
            Happening::Change(Change::Failed(_))
        ));
        assert!(last.windows(2).all(|pair| pair[0].0 >= pair[1].0));
        assert_eq!(log.lost(), 0);
        Ok(())
    }
}
