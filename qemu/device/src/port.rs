// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The port: what the functions of an adapter share. The uplink with what waits for it, the cable,
//! and who is to be woken.
//!
//! # Locks
//!
//! Each [function](crate::function) has its own lock, with its engine and all that is its guest's.
//! The port's are below those, and they are leaves:
//!
//! 1. a function's `turn`, then its `core`, and never those of two functions at a time;
//! 2. under that or without, one of the port's, for a frame to be put in or taken out: the uplink's
//!    `line`, or what waits for a function ([`Inbox`]). Nothing else is locked under it, and nobody
//!    waits there: the uplink's socket does not block.
//!
//! So what one guest does takes no other's lock, but for a moment the uplink's. What it lends
//! ([`ferrite_engine::loan`]) is no lock: who places it holds leases, and waits for nothing as long;
//! who ends one, under the lock of its own function, waits for such a copy at most.

use crate::counters::LinkCounters;
use crate::inbox::{Given, Inbox};
use crate::mapping::{Mapping, Refusal};
use ferrite_engine::roce::Medium;
use ferrite_fabric::framing::{BadLength, Reader, Writer};
use ferrite_fabric::shortcut::{is_message, Message};
use ferrite_fabric::switch::Mac;
use rustix::event::{eventfd, EventfdFlags};
use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes that wait for the uplink at most.
pub const UPLINK_QUEUE: usize = 64 * 1024 * 1024;
/// How many bytes of messages to the switch may wait beyond the frames.
pub const MESSAGES_QUEUE: usize = 64 * 1024;
/// Bytes of it that each engine may fill.
pub const UPLINK_ROOM: usize = 1024 * 1024;

/// Wakes a thread that sleeps in `epoll`.
struct Wake(OwnedFd);

impl Wake {
    fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self(fd))
    }

    fn wake(&self) {
        // It fails only if the counter is full, and then the thread wakes too.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// What of the bytes that wait for the uplink is a function's.
#[derive(Debug, Default)]
struct Share {
    /// Where they are in the stream, from and to.
    ranges: VecDeque<(u64, u64)>,
    bytes: usize,
    /// Its engine waits for room.
    wanted: bool,
}

impl Share {
    fn add(&mut self, start: u64, end: u64) {
        self.bytes += (end - start) as usize;
        match self.ranges.back_mut() {
            Some((_, last)) if *last == start => *last = end,
            _ => self.ranges.push_back((start, end)),
        }
    }

    /// All before this position is written.
    fn settle(&mut self, position: u64) {
        while let Some((start, end)) = self.ranges.front_mut() {
            let done = position.clamp(*start, *end);
            self.bytes -= (done - *start) as usize;
            *start = done;
            if done < *end {
                break;
            }
            self.ranges.pop_front();
        }
    }
}

/// The uplink.
struct Line {
    writer: Writer,
    /// Its socket for writing, while it is connected.
    stream: Option<UnixStream>,
    /// What the user says about the cable.
    cable: bool,
    up: bool,
    /// The port's thread waits for room in the socket.
    watched: bool,
    shares: Vec<Share>,
    counters: LinkCounters,
}

impl Line {
    fn push(&mut self, function: usize, frame: &[u8], most: usize) -> bool {
        let Some(share) = self.shares.get_mut(function) else {
            return false;
        };
        share.settle(self.writer.position());
        let start = self.writer.position() + self.writer.len() as u64;
        if self.stream.is_none() {
            return false;
        }
        let taken = self.up && share.bytes < most && self.writer.push(frame);
        self.counters.sent(frame.len(), taken);
        if taken {
            share.add(start, self.writer.position() + self.writer.len() as u64);
        }
        taken
    }

    /// Who of the functions is to be woken since there is room again, bit by bit.
    fn room_for(&mut self) -> u64 {
        let mut wake = 0;
        for (function, share) in self.shares.iter_mut().enumerate() {
            share.settle(self.writer.position());
            if share.wanted && share.bytes < UPLINK_ROOM / 2 {
                share.wanted = false;
                wake |= 1 << function;
            }
        }
        wake
    }

    fn clear(&mut self) {
        self.writer.clear();
        self.forget_shares();
    }

    fn forget_shares(&mut self) {
        for share in &mut self.shares {
            share.ranges.clear();
            share.bytes = 0;
        }
    }
}

/// The port of an adapter.
pub struct Port {
    mapping: Mapping,
    /// There is an uplink, connected or not: without one the functions have each other.
    has_uplink: bool,
    line: Mutex<Line>,
    inboxes: Vec<Inbox>,
    wakes: Vec<Wake>,
    wake: Wake,
    end: Mutex<Option<Result<(), String>>>,
}

impl Port {
    /// The port of the functions in this table, with an uplink or without.
    pub fn new(mapping: Mapping, has_uplink: bool) -> io::Result<Self> {
        let functions = mapping.rows().len();
        let port = Self {
            has_uplink,
            line: Mutex::new(Line {
                writer: Writer::new(UPLINK_QUEUE),
                stream: None,
                cable: true,
                up: false,
                watched: false,
                shares: (0..functions).map(|_| Share::default()).collect(),
                counters: LinkCounters::default(),
            }),
            inboxes: (0..functions).map(|_| Inbox::new(functions)).collect(),
            wakes: (0..functions)
                .map(|_| Wake::new())
                .collect::<io::Result<_>>()?,
            wake: Wake::new()?,
            end: Mutex::new(None),
            mapping,
        };
        port.update(&mut port.line());
        Ok(port)
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which packets are whose.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Whether it has one function alone.
    pub fn is_alone(&self) -> bool {
        self.mapping.is_alone()
    }

    /// Whether there is an uplink.
    pub fn has_uplink(&self) -> bool {
        self.has_uplink
    }

    /// Whether the link is up, for all functions.
    pub fn is_up(&self) -> bool {
        self.line().up
    }

    fn update(&self, line: &mut Line) {
        let inside = !self.has_uplink && !self.is_alone();
        let up = line.cable && (line.stream.is_some() || inside);
        if line.up && !up {
            // What adapter and switch have to say to each other goes on.
            line.writer.retain(is_message);
            line.forget_shares();
        }
        line.up = up;
    }

    /// The uplink is connected (with the socket to write to) or gone. The functions are to be told
    /// ([`crate::function::Core::uplink_changed`]).
    pub fn set_uplink(&self, stream: Option<UnixStream>) {
        let mut line = self.line();
        line.clear();
        line.stream = stream;
        if line.stream.is_some() {
            line.writer.push_mark();
            if let [row] = self.mapping.rows() {
                // Says that this is a device, and can use shortcuts.
                let any_source = row.any_source;
                let hello = Message::Hello { any_source };
                line.writer.push_always(&hello.to_frame(row.mac));
            } else {
                for row in self.mapping.rows() {
                    let any_source = row.any_source;
                    let address = Message::Address { any_source };
                    line.writer.push_always(&address.to_frame(row.mac));
                }
            }
            line.counters.connects += 1;
        }
        self.update(&mut line);
    }

    /// Pulls the cable, or plugs it in; whether that is news. The functions are to be told
    /// ([`crate::function::Core::cable_changed`]).
    pub fn set_cable(&self, plugged: bool) -> bool {
        let mut line = self.line();
        let changed = line.cable != plugged;
        line.cable = plugged;
        self.update(&mut line);
        changed
    }

    /// Puts a frame of a function's on the uplink; `false` if it is lost.
    pub fn send(&self, function: usize, frame: &[u8]) -> bool {
        // Who has more of the queue has more of the wire.
        let most = if self.is_alone() {
            UPLINK_QUEUE
        } else {
            UPLINK_ROOM
        };
        self.line().push(function, frame, most)
    }

    /// The same with a frame of its engine's; it is lost behind a socket that is stuck.
    pub fn send_within_room(&self, function: usize, frame: &[u8]) -> bool {
        self.line().push(function, frame, UPLINK_ROOM)
    }

    /// What the engine of a function may still put into the uplink's queue.
    pub fn room(&self, function: usize) -> usize {
        let mut line = self.line();
        let position = line.writer.position();
        let Some(share) = line.shares.get_mut(function) else {
            return 0;
        };
        share.settle(position);
        let room = UPLINK_ROOM.saturating_sub(share.bytes);
        // Not enough to be woken for, whatever takes what there is meanwhile.
        share.wanted |= room <= UPLINK_ROOM / 2;
        room
    }

    /// What waits for a function.
    pub fn inbox(&self, function: usize) -> Option<&Inbox> {
        self.inboxes.get(function)
    }

    /// Takes the frames that came by the uplink to the functions that they are for, of which there
    /// are several. No function's lock is needed for that: what one guest has its engine do does not
    /// hold up what is for another.
    pub fn deliver(&self, reader: &mut Reader) -> Result<(), BadLength> {
        let mut wake = 0;
        let mut counters = LinkCounters::default();
        let result = loop {
            let frame = match reader.next_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            if is_message(frame) {
                self.answer(frame);
                continue;
            }
            counters.received(frame.len());
            match self.mapping.from_wire(frame) {
                Ok(targets) => {
                    for function in targets.functions() {
                        let inbox = self.inbox(function);
                        match inbox.map(|inbox| inbox.give(None, Medium::Wire, frame)) {
                            Some(Given::First) => wake |= 1 << function,
                            Some(Given::Behind | Given::Dropped) | None => {}
                        }
                    }
                }
                Err(Refusal::Source) => counters.source_drops += 1,
                Err(Refusal::Vlan | Refusal::Kind) => {}
            }
        };
        {
            let all = &mut self.line().counters;
            all.rx_frames += counters.rx_frames;
            all.rx_bytes += counters.rx_bytes;
            all.source_drops += counters.source_drops;
        }
        self.wake_functions(wake);
        result
    }

    /// The switch says something. There are no shortcuts to an adapter with several functions: it
    /// has not said that it can use them, and takes none.
    fn answer(&self, frame: &[u8]) {
        let answer = match Message::parse(frame) {
            Some((_, Message::Grant { shortcut, .. } | Message::Revoke(shortcut))) => {
                Message::Released(shortcut)
            }
            Some((_, Message::Close(shortcut))) => Message::Closed(shortcut),
            _ => return,
        };
        if let Some(row) = self.mapping.rows().first() {
            self.say(answer, row.mac);
        }
    }

    /// What passed by the uplink, of all functions.
    pub fn counters(&self) -> LinkCounters {
        self.line().counters
    }

    /// Says something to the switch.
    pub fn say(&self, message: Message, from: Mac) {
        let mut line = self.line();
        let queued = line.writer.len();
        let Some(stream) = &line.stream else {
            return;
        };
        if queued > UPLINK_QUEUE + MESSAGES_QUEUE {
            // Who asks on and on and never listens is no switch. The I/O loop finds the stream's end.
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
        line.writer.push_always(&message.to_frame(from));
    }

    /// Writes what waits for the uplink, as far as its socket takes it.
    pub fn flush(&self) {
        let mut guard = self.line();
        let line = &mut *guard;
        if let Some(stream) = &mut line.stream {
            if !line.writer.is_empty() && line.writer.flush(stream).is_err() {
                // The I/O thread sees the end of it, and connects again: what was
                // written of a frame may be half of it.
                let _ = stream.shutdown(Shutdown::Both);
                line.clear();
            }
        }
        if !self.is_alone() {
            let wake = line.room_for();
            drop(guard);
            self.wake_functions(wake);
        }
    }

    /// Bytes that wait for the uplink.
    pub fn queued(&self) -> usize {
        self.line().writer.len()
    }

    /// Whether the uplink's socket has no room for what waits.
    pub fn is_blocked(&self) -> bool {
        !self.line().writer.is_empty()
    }

    /// Whether that is for want of memory in the kernel, of which no event tells.
    pub fn is_starved(&self) -> bool {
        self.line().writer.is_starved()
    }

    /// The port's thread is about to sleep; whether it is to wait for room in the uplink's socket.
    pub fn sleeps(&self) -> bool {
        let mut line = self.line();
        line.watched = !line.writer.is_empty();
        line.watched
    }

    /// Whether the port's thread sleeps and does not wait for the room that is wanted.
    pub fn must_wake(&self) -> bool {
        let line = self.line();
        !line.writer.is_empty() && !line.watched
    }

    /// Has an event (an edge) for each call of [`Port::wake`].
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.0.as_fd()
    }

    /// Wakes the port's thread.
    pub fn wake(&self) {
        self.wake.wake();
    }

    /// Has an event (an edge) for each time that this function is woken.
    pub fn function_wake_fd(&self, function: usize) -> BorrowedFd<'_> {
        // Functions have the numbers of their rows.
        self.wakes[function].0.as_fd()
    }

    /// Wakes the thread of a function.
    pub fn wake_function(&self, function: usize) {
        if let Some(wake) = self.wakes.get(function) {
            wake.wake();
        }
    }

    /// Wakes the threads of functions, bit by bit.
    pub fn wake_functions(&self, functions: u64) {
        if functions == 0 {
            return;
        }
        for function in (0..self.wakes.len()).filter(|bit| functions & (1 << bit) != 0) {
            self.wake_function(function);
        }
    }

    /// Ends the process: in order, or for the given reason.
    pub fn finish(&self, result: Result<(), String>) {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        // The first reason is the one that explains the others.
        if end.is_none() {
            *end = Some(result);
        }
        drop(end);
        self.wake();
    }

    /// How the process is to end, if it is.
    pub fn finished(&self) -> Option<Result<(), String>> {
        self.end
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The uplink's socket, to look at in tests.
    #[cfg(test)]
    pub(crate) fn uplink(&self) -> Option<UnixStream> {
        let line = self.line();
        line.stream
            .as_ref()
            .map(|stream| stream.try_clone().unwrap())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{Row, Vlans};
    use std::io::Read;

    fn port(functions: u8) -> (Port, UnixStream) {
        let row = |function| Row {
            mac: Mac([2, 0, 0, 0, 0, function]),
            any_source: false,
            vlans: Vlans::all(),
        };
        let mapping = Mapping::new((0..functions).map(row).collect()).unwrap();
        let port = Port::new(mapping, true).unwrap();
        let (uplink, switch) = UnixStream::pair().unwrap();
        uplink.set_nonblocking(true).unwrap();
        switch.set_nonblocking(true).unwrap();
        port.set_uplink(Some(uplink));
        (port, switch)
    }

    fn is_woken(port: &Port, function: usize) -> bool {
        rustix::io::read(port.function_wake_fd(function), &mut [0; 8]).is_ok()
    }

    #[test]
    fn a_function_that_fills_the_uplink_takes_nobody_elses_room() {
        let (port, mut switch) = port(2);
        let frame = [0; 9000];
        while port.send_within_room(0, &frame) {
            port.flush();
        }
        assert_eq!(port.room(0), 0);
        assert_eq!(port.room(1), UPLINK_ROOM);
        assert!(port.send_within_room(1, &frame));
        assert!(!is_woken(&port, 0));
        // The switch reads, whoever has it written.
        let mut bytes = vec![0; 1 << 20];
        while port.is_blocked() {
            while switch.read(&mut bytes).is_ok() {}
            port.flush();
        }
        assert!(is_woken(&port, 0), "it waits for the room that there is");
        assert!(!is_woken(&port, 1), "it has not asked");
        assert_eq!(port.room(0), UPLINK_ROOM);
    }

    #[test]
    fn nothing_leaves_by_a_cable_that_is_pulled() {
        let (port, _switch) = port(2);
        port.flush();
        assert!(port.is_up() && port.send(0, &[0; 60]));
        assert!(port.set_cable(false));
        assert!(!port.set_cable(false), "that is no news");
        assert!(!port.is_up() && !port.send(1, &[0; 60]));
        assert_eq!(port.queued(), 0);
        port.set_cable(true);
        assert!(port.send(1, &[0; 60]));
        port.set_uplink(None);
        assert!(!port.is_up() && !port.send(1, &[0; 60]));
    }
}
