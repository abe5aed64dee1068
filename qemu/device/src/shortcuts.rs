// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device's ends of shortcuts: rings in memory that it shares with other
//! devices on this host, past the switch (see [`ferrite_fabric::shortcut`]).

use ferrite_fabric::framing::MAX_FRAME;
use ferrite_fabric::ring::{self, Broken, Consumer, Producer};
use ferrite_fabric::shortcut::{Message, ShortcutId, GRANT_FDS};
use ferrite_fabric::switch::Mac;
use ferrite_fabric::wake;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Bytes that wait for room in a ring at most; more is lost, as on a wire.
const BACKLOG: usize = 16 * 1024 * 1024;
/// How long a device that does not read its ring stops the engine, in
/// nanoseconds; after that the frames for it wait, or get lost, on their own.
const STALL: u64 = 100_000_000;

/// A ring to another device.
struct Outbound {
    id: ShortcutId,
    peer: Mac,
    ring: Producer,
    /// Wakes the other device.
    wake: Arc<OwnedFd>,
    /// Frames for which the ring has no room.
    backlog: VecDeque<Vec<u8>>,
    backlog_bytes: usize,
    /// How far the reader was at time `since`.
    progress: u32,
    since: u64,
    stalled: bool,
    broken: bool,
}

impl Outbound {
    fn push(&mut self, frame: &[u8]) -> bool {
        if self.backlog.is_empty() {
            match self.ring.push(frame) {
                Ok(true) => return true,
                Ok(false) => {}
                Err(Broken) => self.broken = true,
            }
        }
        if self.backlog_bytes + frame.len() > BACKLOG || frame.len() > MAX_FRAME {
            return false;
        }
        self.backlog_bytes += frame.len();
        self.backlog.push_back(frame.to_vec());
        true
    }

    /// Moves what waits into the ring; returns whether to wake the reader.
    fn flush(&mut self, now: u64) -> Result<bool, Broken> {
        if self.broken {
            return Err(Broken);
        }
        while !self.backlog.is_empty() {
            while let Some(frame) = self.backlog.front() {
                if !self.ring.push(frame)? {
                    break;
                }
                self.backlog_bytes -= frame.len();
                self.backlog.pop_front();
            }
            // The reader wakes this device when there is room, unless there
            // is some by now.
            if self.backlog.is_empty() || self.ring.wait_for_room()? {
                break;
            }
        }
        let progress = self.ring.progress();
        if self.backlog.is_empty() || progress != self.progress {
            self.progress = progress;
            self.since = now;
            self.stalled = false;
        } else if now.saturating_sub(self.since) >= STALL {
            self.stalled = true;
        }
        Ok(self.ring.must_wake())
    }
}

/// A ring from another device.
pub struct Inbound {
    id: ShortcutId,
    peer: Mac,
    /// The reading end.
    pub ring: Consumer,
    /// Wakes the other device.
    wake: Arc<OwnedFd>,
    /// All frames that came before the ring's first are received.
    open: bool,
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

    /// Whether frames to this address go past the switch.
    #[inline]
    pub fn reaches(&self, destination: &[u8; 6]) -> bool {
        self.list
            .iter()
            .any(|outbound| outbound.peer.0 == *destination)
    }

    /// Passes on what waits and wakes readers that sleep. Returns the shortcuts
    /// that are broken.
    pub fn flush(&mut self, now: u64) -> Vec<ShortcutId> {
        let mut broken = Vec::new();
        for outbound in &mut self.list {
            match outbound.flush(now) {
                Ok(true) => {
                    self.wakes += 1;
                    wake::signal(&outbound.wake);
                }
                Ok(false) => {}
                Err(Broken) => broken.push(outbound.id),
            }
        }
        broken
    }

    /// When a full ring stops to hold up the engine, if one does.
    pub fn blocked_until(&self) -> Option<u64> {
        self.list
            .iter()
            .filter(|outbound| !outbound.backlog.is_empty() && !outbound.stalled)
            .map(|outbound| outbound.since.saturating_add(STALL))
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

    /// Forgets a ring; returns the frames that did not fit in.
    fn remove(&mut self, id: ShortcutId) -> VecDeque<Vec<u8>> {
        match self.list.iter().position(|outbound| outbound.id == id) {
            Some(index) => self.list.swap_remove(index).backlog,
            None => VecDeque::new(),
        }
    }
}

/// All rings from other devices.
#[derive(Default)]
pub struct Inbounds {
    list: Vec<Inbound>,
    /// What wakes this device, by shortcut.
    events: Vec<(ShortcutId, Arc<OwnedFd>)>,
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
        self.events.clear();
        self.generation += 1;
    }

    /// The rings that may be read.
    pub fn open(&mut self) -> impl Iterator<Item = &mut Inbound> {
        self.list.iter_mut().filter(|inbound| inbound.open)
    }

    /// Has the writers wake this device; `false` if there is something to read.
    pub fn sleep(&self) -> bool {
        let open = self.list.iter().filter(|inbound| inbound.open);
        open.fold(true, |asleep, inbound| inbound.ring.sleep() && asleep)
    }

    /// What wakes this device, if that has changed since `generation`.
    pub fn events(&self, generation: &mut u64) -> Option<Vec<(ShortcutId, Arc<OwnedFd>)>> {
        if *generation == self.generation {
            return None;
        }
        *generation = self.generation;
        Some(self.events.clone())
    }

    fn remove(&mut self, id: ShortcutId) {
        self.list.retain(|inbound| inbound.id != id);
        let count = self.events.len();
        self.events.retain(|(event, _)| *event != id);
        self.generation += u64::from(self.events.len() != count);
    }
}

/// What is to be done because of a message from the switch.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// Frames that go to the switch, in order, before the answer.
    pub frames: VecDeque<Vec<u8>>,
    /// What to answer.
    pub answer: Option<Message>,
    /// The rings of this shortcut are to be read to their end first.
    pub last_frames: Option<ShortcutId>,
}

/// Follows a message from the switch. `now` is the time in nanoseconds, `fds`
/// the descriptors that came from it.
pub fn follow(
    message: Message,
    fds: &mut VecDeque<OwnedFd>,
    now: u64,
    outbound: &mut Outbounds,
    inbound: &mut Inbounds,
) -> Effect {
    let answer = |message| Effect {
        answer: Some(message),
        ..Effect::default()
    };
    match message {
        Message::Grant {
            shortcut: id,
            side,
            peer,
        } => {
            let mut two = fds.drain(..fds.len().min(GRANT_FDS));
            let (Some(memory), Some(end)) = (two.next(), two.next()) else {
                return answer(Message::Released(id));
            };
            drop(two);
            let known = outbound.list.iter().any(|other| other.peer == peer);
            let (producer, consumer) = match ring::attach(&memory, side.into()) {
                Ok(ends) if !known => ends,
                result => {
                    let reason = result
                        .err()
                        .map_or("granted twice".into(), |e| e.to_string());
                    log::warn!("shortcut {id} to {peer} cannot be used: {reason}");
                    return answer(Message::Released(id));
                }
            };
            log::info!("shortcut {id} to {peer}");
            wake::refuse_descriptors(&end);
            let wake = Arc::new(end);
            outbound.list.push(Outbound {
                id,
                peer,
                progress: producer.progress(),
                ring: producer,
                wake: Arc::clone(&wake),
                backlog: VecDeque::new(),
                backlog_bytes: 0,
                since: now,
                stalled: false,
                broken: false,
            });
            inbound.list.push(Inbound {
                id,
                peer,
                ring: consumer,
                wake: Arc::clone(&wake),
                open: false,
            });
            inbound.events.push((id, wake));
            inbound.generation += 1;
            inbound.granted += 1;
            answer(Message::Ready(id))
        }
        Message::Open(id) => {
            for ring in inbound.list.iter_mut().filter(|ring| ring.id == id) {
                ring.open = true;
            }
            Effect::default()
        }
        Message::Revoke(id) => Effect {
            frames: outbound.remove(id),
            answer: Some(Message::Released(id)),
            last_frames: None,
        },
        Message::Close(id) => {
            // The writer has stopped, whether or not the ring was opened.
            for ring in inbound.list.iter_mut().filter(|ring| ring.id == id) {
                ring.open = true;
            }
            Effect {
                answer: Some(Message::Closed(id)),
                last_frames: Some(id),
                ..Effect::default()
            }
        }
        // Nothing that a switch says.
        Message::Hello { .. } | Message::Ready(_) | Message::Released(_) | Message::Closed(_) => {
            Effect::default()
        }
    }
}

/// Gives up a shortcut: because it is closed, or because the other side does
/// not keep to the rules, in which case the switch has to be told. Returns the
/// frames that did not fit in any more.
pub fn forget(
    id: ShortcutId,
    outbound: &mut Outbounds,
    inbound: &mut Inbounds,
) -> VecDeque<Vec<u8>> {
    inbound.remove(id);
    outbound.remove(id)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let effect = follow(message, &mut fds, 0, &mut self.outbound, &mut self.inbound);
            self.socket.extend(effect.frames);
            self.answers.extend(effect.answer);
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
                inbound.ring.look()?;
                while let Some(length) = inbound.ring.next(&mut buffer)? {
                    numbers.push(number(&buffer[..length]));
                }
                inbound.release();
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

    #[test]
    fn a_full_ring_stops_the_engine_for_a_while_and_loses_nothing() {
        let (mut a, mut b, events) = pair();
        b.tell(Message::Open(7), vec![]);
        for number in 0..1000 {
            a.send(frame(B, number, 4096));
        }
        assert!(a.outbound.flush(5).is_empty());
        assert_eq!(a.outbound.blocked_until(), Some(STALL));
        a.outbound.flush(STALL);
        assert_eq!(a.outbound.blocked_until(), None, "others can go on");
        let mut got = Vec::new();
        while got.len() < 1000 {
            got.extend(b.read().unwrap());
            assert!(got.len() == 1000 || fired(&events[0]), "told of the room");
            a.outbound.flush(STALL + 1);
        }
        assert!(got.into_iter().eq(0..1000));
        assert_eq!(a.outbound.blocked_until(), None);
    }

    #[test]
    fn a_shortcut_revoked_in_the_middle_of_a_stream_loses_nothing() {
        let (mut a, mut b, _) = pair();
        b.tell(Message::Open(7), vec![]);
        // More than the ring takes.
        for number in 0..500 {
            a.send(frame(B, number, 4096));
        }
        let mut got = b.read().unwrap();
        a.tell(Message::Revoke(7), vec![]);
        assert_eq!(a.answers.last(), Some(&Message::Released(7)));
        for number in 500..600 {
            a.send(frame(B, number, 4096));
        }
        // What comes by the socket is behind what is in the ring.
        b.tell(Message::Close(7), vec![]);
        got.extend(b.read().unwrap());
        got.extend(a.socket.iter().map(|frame| number(frame)));
        assert!(got.into_iter().eq(0..600));
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
