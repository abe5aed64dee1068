// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device's ends of shortcuts: rings in memory that it shares with other
//! devices on this host, past the switch (see [`ferrite_fabric::shortcut`]).

use crate::guest_memory::copy_out;
use ferrite_engine::memory::{Lending, Room, ENOUGH_ROOM};
use ferrite_engine::Loan;
use ferrite_fabric::fault::is_roce;
use ferrite_fabric::ring::{self, Broken, Consumer, Producer, Span, MAX_TRAIN};
use ferrite_fabric::shortcut::{Message, ShortcutId, GRANT_FDS, MAX_SHORTCUTS};
use ferrite_fabric::switch::Mac;
use ferrite_fabric::wake::{self, End};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How long a way may be full until it is taken for stuck, in nanoseconds: then frames that may
/// get lost do so, and do not hold up others behind them.
const STALL: u64 = 100_000_000;

/// What goes by a ring without being copied into frames. It takes room there, like frames.
pub const LENDING: Lending = Lending {
    at_once: MAX_TRAIN as u32,
    under_way: 512 << 10,
};

/// Whether the engine waits for room on a way, and since when.
#[derive(Debug, Default)]
pub struct Congestion {
    /// The engine was told of less than enough room, at this time if that is known yet.
    wanted: bool,
    since: Option<u64>,
    stuck: bool,
}

impl Congestion {
    /// What to tell the engine about a way with room for `bytes`.
    #[inline]
    pub fn ask(&mut self, bytes: usize) -> Room {
        if bytes >= ENOUGH_ROOM {
            return Room::Bytes(bytes);
        }
        self.wanted = true;
        if self.stuck {
            Room::Stuck
        } else {
            Room::Bytes(bytes)
        }
    }

    /// Whether nobody has made room for so long that what is sent is lost.
    pub fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// Whether the engine waits for room.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Looks whether the engine is to be told: there is `room` again, or none for too long. Only
    /// room that is worth it counts: who takes a little now and then is as slow as can be.
    pub fn look(&mut self, room: bool, now: u64) -> bool {
        if !self.wanted {
            return false;
        }
        if room {
            *self = Self::default();
            return true;
        }
        let since = *self.since.get_or_insert(now);
        let stuck = now.saturating_sub(since) >= STALL;
        stuck && !std::mem::replace(&mut self.stuck, stuck)
    }

    /// When to look again at the latest.
    pub fn deadline(&self) -> Option<u64> {
        let since = self.since.filter(|_| self.wanted && !self.stuck);
        since.map(|since| since.saturating_add(STALL))
    }
}

/// A ring to another device.
struct Outbound {
    id: ShortcutId,
    peer: Mac,
    ring: Producer,
    /// Wakes the other device.
    wake: Arc<End>,
    congestion: Congestion,
    broken: bool,
}

impl Outbound {
    fn push(&mut self, frame: &[u8]) -> bool {
        match self.ring.push(frame) {
            Ok(taken) => taken,
            Err(Broken) => {
                self.broken = true;
                false
            }
        }
    }

    fn push_lent(&mut self, head: &[u8], loan: &Loan) -> bool {
        let copy = |to: &Span| copy_out(loan, to);
        let pushed = self.ring.push_train(head, loan.log_mtu(), loan.len(), copy);
        pushed.unwrap_or_else(|Broken| {
            self.broken = true;
            false
        })
    }

    fn room(&mut self) -> Room {
        match self.ring.room(ENOUGH_ROOM) {
            Ok(bytes) => self.congestion.ask(bytes),
            Err(Broken) => {
                // Nothing more, until the next flush gives it up.
                self.broken = true;
                Room::Bytes(0)
            }
        }
    }

    /// Returns whether to wake the reader, and whether to tell the engine of room.
    fn flush(&mut self, now: u64) -> Result<(bool, bool), Broken> {
        if self.broken {
            return Err(Broken);
        }
        let tell = if self.congestion.is_wanted() {
            // The reader wakes this device when there is room, unless there is some by now.
            let room = !self.ring.wait_for_room()?;
            self.congestion.look(room, now)
        } else {
            false
        };
        Ok((self.ring.must_wake(), tell))
    }
}

/// A ring from another device.
pub struct Inbound {
    id: ShortcutId,
    peer: Mac,
    /// The reading end.
    pub ring: Consumer,
    /// Wakes the other device.
    wake: Arc<End>,
    /// All frames that came before the ring's first are received.
    open: bool,
    /// Its writer is told to send by the switch again, or has stopped: what comes
    /// from it by there is behind what is in the ring.
    goes_first: bool,
    /// Nobody writes any more, and what was there when that was said is all.
    last: bool,
}

impl Inbound {
    /// The shortcut it belongs to.
    pub fn id(&self) -> ShortcutId {
        self.id
    }

    /// Whose frames are in it.
    pub fn peer(&self) -> Mac {
        self.peer
    }

    /// Whether it is closed when what is left in it is read.
    pub fn is_last(&self) -> bool {
        self.last
    }

    /// What the switch is to be told after a read, if this ring is of no more
    /// use.
    pub fn answer(&self, read: Result<(), Broken>) -> Option<Message> {
        match read {
            Ok(()) if !self.last || !self.ring.is_drained() => None,
            Err(Broken) if !self.last => Some(Message::Released(self.id)),
            // Whether or not something was wrong with the rest.
            _ => Some(Message::Closed(self.id)),
        }
    }

    /// Gives back the room of what was read.
    pub fn release(&self) {
        if self.ring.release() {
            wake::signal(&self.wake);
        }
    }
}

/// All rings to other devices.
#[derive(Default)]
pub struct Outbounds {
    list: Vec<Outbound>,
    /// Times that another device was woken.
    pub wakes: u64,
}

impl Outbounds {
    /// Sends a frame past the switch, if there is a way to where it goes:
    /// `None` if there is none, `Some(false)` if the frame is lost.
    #[inline]
    pub fn push(&mut self, frame: &[u8]) -> Option<bool> {
        let destination = frame.first_chunk::<6>()?;
        let outbound = self
            .list
            .iter_mut()
            .find(|outbound| outbound.peer.0 == *destination)?;
        Some(outbound.push(frame))
    }

    /// Sends packets that go as one past the switch, by a shortcut; whether they were taken.
    pub fn push_lent(&mut self, head: &[u8], loan: &Loan) -> bool {
        let to = |outbound: &&mut Outbound| head.starts_with(&outbound.peer.0);
        let outbound = self.list.iter_mut().find(to);
        outbound.is_some_and(|outbound| outbound.push_lent(head, loan))
    }

    /// The shortcut by which frames to this address go past the switch.
    #[inline]
    pub fn to(&self, destination: &[u8; 6]) -> Option<ShortcutId> {
        let mut list = self.list.iter();
        let outbound = list.find(|outbound| outbound.peer.0 == *destination)?;
        Some(outbound.id)
    }

    /// What may be sent by a shortcut now. One that is gone takes everything: the frames go
    /// another way.
    #[inline]
    pub fn room(&mut self, id: ShortcutId) -> Room {
        match self.list.iter_mut().find(|outbound| outbound.id == id) {
            Some(outbound) => outbound.room(),
            None => Room::Bytes(usize::MAX),
        }
    }

    /// Wakes readers that sleep.
    pub fn flush(&mut self, now: u64) -> Flushed {
        let mut flushed = Flushed::default();
        for outbound in &mut self.list {
            match outbound.flush(now) {
                Ok((wake, room_again)) => {
                    if wake {
                        self.wakes += 1;
                        wake::signal(&outbound.wake);
                    }
                    flushed.room_again |= room_again;
                }
                Err(Broken) => flushed.broken.push(outbound.id),
            }
        }
        flushed
    }

    /// When to flush at the latest, because of rings that are full.
    pub fn deadline(&self) -> Option<u64> {
        self.list
            .iter()
            .filter_map(|outbound| outbound.congestion.deadline())
            .min()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.list.clear();
    }

    fn remove(&mut self, id: ShortcutId) {
        self.list.retain(|outbound| outbound.id != id);
    }
}

/// What a look at the rings to other devices found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// These shortcuts are broken.
    pub broken: Vec<ShortcutId>,
    /// The engine is to be told that there is room again, or that a ring is stuck.
    pub room_again: bool,
}

/// All rings from other devices.
#[derive(Default)]
pub struct Inbounds {
    list: Vec<Inbound>,
    /// How many of them go before what comes by the switch.
    first: usize,
    /// What wakes this device, by shortcut.
    events: Vec<(ShortcutId, Arc<End>)>,
    /// Changes whenever `events` does.
    generation: u64,
    /// Shortcuts that were granted so far.
    pub granted: u64,
}

impl Inbounds {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.list.clear();
        self.count_first();
        self.events.clear();
        self.generation += 1;
    }

    /// The rings that may be read.
    pub fn open(&mut self) -> impl Iterator<Item = &mut Inbound> {
        self.list.iter_mut().filter(|inbound| inbound.open)
    }

    /// This one is the first to be read from now on, then those behind it.
    pub fn begin_with(&mut self, id: ShortcutId) {
        let place = self.list.iter().position(|inbound| inbound.id == id);
        self.list.rotate_left(place.unwrap_or(0));
    }

    /// Whether some are to be read to their end and closed.
    pub fn is_closing(&self) -> bool {
        self.list.iter().any(Inbound::is_last)
    }

    /// The ring that is to be read before a frame to this device alone that came
    /// by the switch: what its writer sends there is in order.
    #[inline]
    pub fn before(&self, frame: &[u8]) -> Option<ShortcutId> {
        if self.first == 0 {
            return None;
        }
        let source = frame.get(6..12)?;
        let mut list = self.list.iter();
        let of_source = list.find(|ring| ring.open && ring.goes_first && ring.peer.0 == *source)?;
        // What the VM's own interface sends never goes by a ring.
        is_roce(frame).then_some(of_source.id)
    }

    /// Whether all is read that was seen in the ring of a shortcut.
    pub fn is_drained(&self, id: ShortcutId) -> bool {
        let mut of_shortcut = self.list.iter().filter(|ring| ring.id == id);
        of_shortcut.all(|ring| ring.ring.is_drained())
    }

    /// What was in this ring is read. It is not waited for again until it is
    /// closed, or one that goes on writing would be all the time.
    pub fn went_first(&mut self, id: ShortcutId) {
        for ring in self.list.iter_mut().filter(|ring| ring.id == id) {
            ring.goes_first = false;
        }
        self.count_first();
    }

    fn count_first(&mut self) {
        self.first = self.list.iter().filter(|ring| ring.goes_first).count();
    }

    /// Has the writers wake this device; `false` if there is something to read.
    pub fn sleep(&self) -> bool {
        let mut asleep = true;
        for inbound in self.list.iter().filter(|inbound| inbound.open) {
            // What is written behind the last frame is nothing to wake for.
            asleep &= !inbound.last && inbound.ring.sleep();
        }
        asleep
    }

    /// What wakes this device, if that has changed since `generation`.
    pub fn events(&self, generation: &mut u64) -> Option<Vec<(ShortcutId, Arc<End>)>> {
        if *generation == self.generation {
            return None;
        }
        *generation = self.generation;
        Some(self.events.clone())
    }

    fn remove(&mut self, id: ShortcutId) {
        self.list.retain(|inbound| inbound.id != id);
        self.count_first();
        let count = self.events.len();
        self.events.retain(|(event, _)| *event != id);
        self.generation += u64::from(self.events.len() != count);
    }
}

/// Follows a message from the switch and returns what to answer. `fds` are the
/// descriptors that came from it.
///
/// A ring that is closed stays until it is [read](Inbound::answer) to its end.
pub fn follow(
    message: Message,
    fds: &mut VecDeque<OwnedFd>,
    outbound: &mut Outbounds,
    inbound: &mut Inbounds,
) -> Option<Message> {
    match message {
        Message::Grant {
            shortcut: id,
            side,
            peer,
        } => {
            let mut two = fds.drain(..fds.len().min(GRANT_FDS));
            let (Some(memory), Some(end)) = (two.next(), two.next()) else {
                return Some(Message::Released(id));
            };
            drop(two);
            // Also of rings that are only read to their end: an id is of one shortcut at a time.
            let known = outbound.list.iter().any(|other| other.peer == peer)
                || inbound.list.iter().any(|other| other.id == id);
            if inbound.list.len() >= MAX_SHORTCUTS {
                log::warn!("shortcut {id} to {peer} is one too many");
                return Some(Message::Released(id));
            }
            let attached =
                End::adopt(end).and_then(|end| Ok((end, ring::attach(&memory, side.into())?)));
            let (end, (producer, consumer)) = match attached {
                Ok(ends) if !known => ends,
                result => {
                    let reason = result
                        .err()
                        .map_or("granted twice".into(), |e| e.to_string());
                    log::warn!("shortcut {id} to {peer} cannot be used: {reason}");
                    return Some(Message::Released(id));
                }
            };
            log::info!("shortcut {id} to {peer}");
            let wake = Arc::new(end);
            outbound.list.push(Outbound {
                id,
                peer,
                ring: producer,
                wake: Arc::clone(&wake),
                congestion: Congestion::default(),
                broken: false,
            });
            inbound.list.push(Inbound {
                id,
                peer,
                ring: consumer,
                wake: Arc::clone(&wake),
                open: false,
                goes_first: false,
                last: false,
            });
            inbound.events.push((id, wake));
            inbound.generation += 1;
            inbound.granted += 1;
            Some(Message::Ready(id))
        }
        Message::Open(id) => {
            for ring in inbound.list.iter_mut().filter(|ring| ring.id == id) {
                ring.open = true;
            }
            None
        }
        Message::Revoke(id) => {
            outbound.remove(id);
            for ring in inbound.list.iter_mut().filter(|ring| ring.id == id) {
                ring.goes_first = true;
            }
            inbound.count_first();
            Some(Message::Released(id))
        }
        Message::Close(id) => {
            outbound.remove(id);
            let mut left = false;
            for ring in inbound.list.iter_mut().filter(|ring| ring.id == id) {
                // The writer has stopped, whether or not the ring was opened:
                // there is one ring full at most.
                ring.open = true;
                ring.last = true;
                // Also if it went first before: perhaps the writer had not been
                // told by then, and that was a frame of its VM's own interface.
                ring.goes_first = true;
                let seen = ring.ring.look();
                left |= ring.answer(seen).is_none();
            }
            if left {
                inbound.count_first();
                return None;
            }
            inbound.remove(id);
            Some(Message::Closed(id))
        }
        // Nothing that a switch says.
        Message::Hello { .. }
        | Message::Address { .. }
        | Message::Ready(_)
        | Message::Released(_)
        | Message::Closed(_) => None,
    }
}

/// Gives up a shortcut: because it is closed, or because the other side does
/// not keep to the rules, in which case the switch has to be told.
pub fn forget(id: ShortcutId, outbound: &mut Outbounds, inbound: &mut Inbounds) {
    inbound.remove(id);
    outbound.remove(id);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_engine::memory::FRAME_OVERHEAD;
    use ferrite_fabric::framing::MAX_FRAME;

    const A: Mac = Mac([0x52, 0x54, 0, 0xfe, 0, 1]);
    const B: Mac = Mac([0x52, 0x54, 0, 0xfe, 0, 2]);

    #[derive(Default)]
    struct Side {
        outbound: Outbounds,
        inbound: Inbounds,
        /// What left by the socket.
        socket: Vec<Vec<u8>>,
        answers: Vec<Message>,
    }

    impl Side {
        fn tell(&mut self, message: Message, fds: Vec<OwnedFd>) {
            let mut fds = fds.into();
            let answer = follow(message, &mut fds, &mut self.outbound, &mut self.inbound);
            self.answers.extend(answer);
        }

        fn send(&mut self, frame: Vec<u8>) {
            if self.outbound.push(&frame).is_none() {
                self.socket.push(frame);
            }
        }

        fn read(&mut self) -> Result<Vec<u32>, Broken> {
            let mut numbers = Vec::new();
            let mut buffer = [0; MAX_FRAME];
            for inbound in self.inbound.open() {
                if !inbound.is_last() {
                    inbound.ring.look()?;
                }
                while let Some(record) = inbound.ring.next(&mut buffer)? {
                    numbers.push(number(&buffer[..record.copied()]));
                }
                inbound.release();
                self.answers.extend(inbound.answer(Ok(())));
            }
            Ok(numbers)
        }
    }

    fn frame(to: Mac, number: u32, length: usize) -> Vec<u8> {
        let mut frame = vec![0; length];
        frame[..6].copy_from_slice(&to.0);
        frame[14..18].copy_from_slice(&number.to_le_bytes());
        frame
    }

    fn number(frame: &[u8]) -> u32 {
        u32::from_le_bytes(*frame[14..].first_chunk().unwrap())
    }

    /// An end to which there is no other.
    fn event() -> OwnedFd {
        let [end, _] = wake::pair().unwrap();
        end
    }

    fn fired(event: &OwnedFd) -> bool {
        rustix::io::read(event, &mut [0; 8]).is_ok()
    }

    /// Two devices with a shortcut, and what wakes each.
    fn pair() -> (Side, Side, [OwnedFd; 2]) {
        let memory = ring::create().unwrap();
        let events = wake::pair().unwrap();
        let (mut a, mut b) = (Side::default(), Side::default());
        for (number, side, peer) in [(0u8, &mut a, B), (1, &mut b, A)] {
            let own = usize::from(number);
            let fds = [&memory, &events[own]];
            let fds = fds.map(|fd| fd.try_clone().unwrap()).into();
            let grant = Message::Grant {
                shortcut: 7,
                side: number,
                peer,
            };
            side.tell(grant, fds);
            assert_eq!(side.answers, [Message::Ready(7)]);
        }
        (a, b, events)
    }

    #[test]
    fn frames_take_the_shortcut_to_its_address_only() {
        let (mut a, mut b, _) = pair();
        a.send(frame(B, 1, 60));
        a.send(frame(Mac([0xff; 6]), 2, 60));
        assert_eq!(a.socket.len(), 1);
        // Not before everything that was sent by the socket has arrived.
        assert_eq!(b.read(), Ok(vec![]));
        b.tell(Message::Open(7), vec![]);
        assert_eq!(b.read(), Ok(vec![1]));
    }

    #[test]
    fn a_sleeping_device_is_woken_and_an_awake_one_is_not() {
        let (mut a, mut b, events) = pair();
        b.tell(Message::Open(7), vec![]);
        a.send(frame(B, 1, 60));
        a.outbound.flush(0);
        assert!(!fired(&events[1]));
        assert!(!b.inbound.sleep());
        b.read().unwrap();
        assert!(b.inbound.sleep());
        a.send(frame(B, 2, 60));
        a.outbound.flush(0);
        assert!(fired(&events[1]));
        assert_eq!(a.outbound.wakes, 1);
    }

    /// Sends frames of 4096 bytes from `number` on as long as the ring has room, like an engine.
    fn stream(side: &mut Side, number: &mut u32) {
        while matches!(side.outbound.room(7), Room::Bytes(room) if room >= 4096 + FRAME_OVERHEAD) {
            let frame = frame(B, *number, 4096);
            assert_eq!(side.outbound.push(&frame), Some(true), "room that was none");
            *number += 1;
        }
    }

    #[test]
    fn a_full_ring_says_so_and_loses_nothing() {
        let (mut a, mut b, events) = pair();
        b.tell(Message::Open(7), vec![]);
        let (mut sent, mut got) = (0, Vec::new());
        stream(&mut a, &mut sent);
        assert!(sent > 200);
        while sent < 1000 {
            assert_eq!(a.outbound.flush(5), Flushed::default());
            assert_eq!(a.outbound.deadline(), Some(5 + STALL));
            got.extend(b.read().unwrap());
            assert!(fired(&events[0]), "told of the room");
            assert!(a.outbound.flush(6).room_again);
            assert_eq!(a.outbound.deadline(), None);
            stream(&mut a, &mut sent);
        }
        got.extend(b.read().unwrap());
        assert!(got.into_iter().eq(0..sent));
    }

    #[test]
    fn a_reader_that_takes_a_little_now_and_then_is_stuck_all_the_same() {
        let (mut a, mut b, _) = pair();
        b.tell(Message::Open(7), vec![]);
        let mut sent = 0;
        stream(&mut a, &mut sent);
        let mut buffer = [0; MAX_FRAME];
        let (mut now, mut told) = (0, 0);
        // A frame each time, just before the clock would run out if that started it anew.
        while now < 3 * STALL {
            told += u32::from(a.outbound.flush(now).room_again);
            let inbound = b.inbound.open().next().unwrap();
            inbound.ring.look().unwrap();
            assert!(inbound.ring.next(&mut buffer).unwrap().is_some());
            inbound.release();
            assert!(matches!(a.outbound.room(7), Room::Bytes(_)) == (told == 0));
            now += STALL - 1;
        }
        assert_eq!(told, 1, "the engine is told once");
        assert_eq!(a.outbound.room(7), Room::Stuck);
        // It reads after all.
        b.read().unwrap();
        assert!(a.outbound.flush(now).room_again);
        assert!(matches!(a.outbound.room(7), Room::Bytes(room) if room > ring::WAKE_ROOM));
    }

    #[test]
    fn a_shortcut_revoked_in_the_middle_of_a_stream_loses_nothing() {
        let (mut a, mut b, _) = pair();
        b.tell(Message::Open(7), vec![]);
        let (mut sent, mut got) = (0, Vec::new());
        stream(&mut a, &mut sent);
        got.extend(b.read().unwrap());
        stream(&mut a, &mut sent);
        a.tell(Message::Revoke(7), vec![]);
        assert_eq!(a.answers.last(), Some(&Message::Released(7)));
        // It does not hold up what goes by the switch now.
        assert_eq!(a.outbound.room(7), Room::Bytes(usize::MAX));
        for number in sent..sent + 100 {
            a.send(frame(B, number, 4096));
        }
        // What comes by the socket is behind what is in the ring.
        b.tell(Message::Close(7), vec![]);
        assert_eq!(b.answers.last(), Some(&Message::Ready(7)));
        assert!(!b.inbound.sleep());
        got.extend(b.read().unwrap());
        assert_eq!(b.answers.last(), Some(&Message::Closed(7)));
        got.extend(a.socket.iter().map(|frame| number(frame)));
        assert!(got.into_iter().eq(0..sent + 100));
        forget(7, &mut b.outbound, &mut b.inbound);
        assert!(b.outbound.is_empty());
        assert!(b
            .inbound
            .events(&mut 1)
            .is_some_and(|events| events.is_empty()));
    }

    #[test]
    fn a_grant_that_cannot_be_used_is_refused() {
        let grant = Message::Grant {
            shortcut: 3,
            side: 0,
            peer: B,
        };
        let mut side = Side::default();
        side.tell(grant, vec![]);
        side.tell(grant, vec![event(), event()]);
        assert_eq!(side.answers, [Message::Released(3); 2]);
        assert!(side.outbound.is_empty());
        // A second one to the same address.
        let (mut a, _, _) = pair();
        a.tell(grant, vec![ring::create().unwrap(), event()]);
        assert_eq!(a.answers.last(), Some(&Message::Released(3)));
        assert_eq!(a.outbound.len(), 1);
    }
}
