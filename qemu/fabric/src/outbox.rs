// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What waits for a port: frames, and messages about shortcuts, some with
//! descriptors, among them or in front of them.

use crate::descriptors;
use crate::framing::Writer;
use crate::shortcut::{ShortcutId, GRANT_FDS};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Bytes of messages that wait beyond those of frames: far more than there are
/// for a port that reads what it answers.
const MESSAGES: usize = 64 * 1024;

/// A grant that is not sent yet.
struct Grant {
    /// Where among the urgent messages its frame begins.
    position: u64,
    shortcut: ShortcutId,
    fds: [OwnedFd; GRANT_FDS],
}

/// A grant that is sent, and perhaps not read.
struct Sent {
    /// Bytes of the stream up to its descriptors.
    position: u64,
    at: u64,
}

/// Where the last message about a shortcut ends that asks for an answer.
enum Mark {
    Urgent(u64),
    InOrder(u64),
}

/// Frames and messages in the order in which they are to be sent.
///
/// A grant and a revocation say nothing about the frames around them. They go
/// before all that waits, in the order of their own, so that a port with a long
/// queue has them as soon as another.
pub struct Outbox {
    frames: Writer,
    urgent: Writer,
    grants: VecDeque<Grant>,
    sent: VecDeque<Sent>,
    asked: HashMap<ShortcutId, Mark>,
    /// Bytes that were left out of the stream.
    skipped: u64,
    limit: usize,
}

impl Outbox {
    /// One that holds at most `limit` bytes of frames.
    pub fn new(limit: usize) -> Self {
        Self {
            frames: Writer::new(limit),
            urgent: Writer::new(MESSAGES),
            grants: VecDeque::new(),
            sent: VecDeque::new(),
            asked: HashMap::new(),
            skipped: 0,
            limit,
        }
    }

    /// Appends a frame if then no more than `limit` bytes wait; `false` if it is
    /// lost.
    pub fn push_within(&mut self, frame: &[u8], limit: usize) -> bool {
        self.frames.push_within(frame, limit)
    }

    /// Appends a message, also where there is no room for a frame; `false` if
    /// even so there is none.
    #[must_use]
    pub fn push_message(&mut self, message: &[u8]) -> bool {
        let room = self.frames.len() <= self.limit + MESSAGES;
        if room {
            self.frames.push_always(message);
        }
        room
    }

    /// Appends a message that asks for an answer about a shortcut, like
    /// [`Outbox::push_message`].
    #[must_use]
    pub fn push_request(&mut self, message: &[u8], shortcut: ShortcutId) -> bool {
        let room = self.push_message(message);
        let end = self.frames.position() + self.frames.len() as u64;
        self.asked.insert(shortcut, Mark::InOrder(end));
        room
    }

    /// The same in front of all frames.
    #[must_use]
    pub fn push_urgent(&mut self, message: &[u8], shortcut: ShortcutId) -> bool {
        let room = self.urgent.push(message);
        let end = self.urgent.position() + self.urgent.len() as u64;
        self.asked.insert(shortcut, Mark::Urgent(end));
        room
    }

    /// Whether the last request about a shortcut is not written yet.
    pub fn has_request(&self, shortcut: ShortcutId) -> bool {
        self.asked
            .get(&shortcut)
            .is_some_and(|mark| self.is_ahead(mark))
    }

    fn is_ahead(&self, mark: &Mark) -> bool {
        match mark {
            Mark::Urgent(end) => self.urgent.position() < *end,
            Mark::InOrder(end) => self.frames.position() < *end,
        }
    }

    /// Whether the grant of a shortcut waits.
    pub fn has_grant(&self, shortcut: ShortcutId) -> bool {
        self.grants.iter().any(|grant| grant.shortcut == shortcut)
    }

    /// Grants that wait.
    pub fn grants(&self) -> usize {
        self.grants.len()
    }

    /// Grants whose descriptors the port has not received.
    pub fn unread_grants(&self) -> usize {
        self.grants.len() + self.sent.len()
    }

    /// When the first of the grants was sent that are not read.
    pub fn unread_since(&self) -> Option<u64> {
        self.sent.front().map(|sent| sent.at)
    }

    /// Appends the grant of a shortcut, in front of all frames. Who has
    /// [many](Outbox::unread_grants) gets none.
    pub fn push_grant(&mut self, message: &[u8], shortcut: ShortcutId, fds: [OwnedFd; GRANT_FDS]) {
        self.grants.push_back(Grant {
            position: self.urgent.position() + self.urgent.len() as u64,
            shortcut,
            fds,
        });
        self.urgent.push_always(message);
    }

    /// Bytes waiting.
    pub fn len(&self) -> usize {
        self.frames.len() + self.urgent.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.urgent.is_empty()
    }

    /// Whether it waits for memory in the kernel; see [`Writer::is_starved`].
    pub fn is_starved(&self) -> bool {
        self.frames.is_starved() || self.urgent.is_starved()
    }

    /// Bytes written since the stream began.
    pub fn position(&self) -> u64 {
        self.frames.position() + self.urgent.position() - self.skipped
    }

    /// Writes as much as `stream` takes at the time `now`.
    ///
    /// The kernel limits how many descriptors a user may have under way, read by
    /// nobody. A grant that meets the limit is left out and put into `lost`: it
    /// is others that do not read, and everything else goes on.
    pub fn flush(
        &mut self,
        stream: &UnixStream,
        now: u64,
        lost: &mut Vec<ShortcutId>,
    ) -> io::Result<()> {
        let result = self.write(stream, now, lost);
        let mut asked = std::mem::take(&mut self.asked);
        asked.retain(|_, mark| self.is_ahead(mark));
        self.asked = asked;
        result
    }

    fn write(
        &mut self,
        stream: &UnixStream,
        now: u64,
        lost: &mut Vec<ShortcutId>,
    ) -> io::Result<()> {
        // Of the two, one at most is in the middle of a frame.
        if !self.frames.flush_begun(&mut &*stream)? {
            return Ok(());
        }
        while let Some(grant) = self.grants.front() {
            if !self.urgent.flush_up_to(grant.position, &mut &*stream)? {
                return Ok(());
            }
            let mut sink = WithDescriptors(stream, &grant.fds);
            match self.urgent.flush_up_to(grant.position + 1, &mut sink) {
                Ok(true) => self.sent.push_back(Sent {
                    position: self.frames.position() + self.urgent.position() - self.skipped,
                    at: now,
                }),
                Ok(false) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error()) => {
                    lost.push(grant.shortcut);
                    self.urgent.skip_frame();
                    self.skipped += self.urgent.position() - grant.position;
                }
                Err(error) => return Err(error),
            }
            self.grants.pop_front();
        }
        if self.urgent.flush(&mut &*stream)? {
            self.frames.flush(&mut &*stream)?;
        }
        Ok(())
    }

    /// Looks which grants the port has read. What it says about them does not
    /// count: it can look at a message and leave it, with its descriptors, where
    /// it is (`MSG_PEEK`).
    pub fn look(&mut self, stream: &UnixStream) -> io::Result<()> {
        if self.sent.is_empty() {
            return Ok(());
        }
        let position = self.position();
        forget_read(&mut self.sent, position, stream)
    }

    /// What is left of it when nothing more is written.
    pub fn into_unread(self) -> Unread {
        Unread {
            position: self.position(),
            sent: self.sent,
        }
    }
}

/// Forgets the grants that are read from a stream of which so much is written.
fn forget_read(sent: &mut VecDeque<Sent>, position: u64, stream: &UnixStream) -> io::Result<()> {
    // In what takes so much memory there are no more bytes.
    let read = position.saturating_sub(descriptors::unread(stream)?);
    while sent.front().is_some_and(|sent| sent.position <= read) {
        sent.pop_front();
    }
    Ok(())
}

/// Grants in the socket of a port that is gone. They are under way as long as
/// the other side has its end and does not read them, whatever is done here.
pub struct Unread {
    position: u64,
    sent: VecDeque<Sent>,
}

impl Unread {
    /// Looks which are read, or went with the other end.
    pub fn look(&mut self, stream: &UnixStream) -> io::Result<()> {
        forget_read(&mut self.sent, self.position, stream)
    }

    /// How many there are.
    pub fn grants(&self) -> usize {
        self.sent.len()
    }
}

/// Sends descriptors with what is written.
struct WithDescriptors<'a>(&'a UnixStream, &'a [OwnedFd]);

impl io::Write for WithDescriptors<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        descriptors::send(self.0, bytes, self.1)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptors::Receiver;
    use crate::framing::Reader;
    use crate::shortcut::Message;
    use crate::switch::Mac;

    fn file(size: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, size).unwrap();
        file
    }

    fn grant(outbox: &mut Outbox, shortcut: ShortcutId) {
        let message = Message::Revoke(shortcut).to_frame(Mac([2; 6]));
        let size = shortcut.into();
        outbox.push_grant(&message, shortcut, [file(size), file(size)]);
    }

    #[test]
    fn messages_that_nobody_reads_are_bounded() {
        let mut outbox = Outbox::new(1 << 16);
        while outbox.push_within(&[1; 1000], 1 << 16) {}
        let message = Message::Revoke(1).to_frame(Mac([2; 6]));
        let count = (0..1 << 20).take_while(|_| outbox.push_message(&message));
        assert!((500..2000).contains(&count.count()));
    }

    #[test]
    fn a_request_goes_before_the_frames_and_its_time_is_known() {
        let (a, b) = UnixStream::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        b.set_nonblocking(true).unwrap();
        let mut outbox = Outbox::new(1 << 22);
        while outbox.push_within(&[1; 16_000], 1 << 22) {}
        let mut lost = Vec::new();
        // The socket is full, in the middle of a frame.
        outbox.flush(&a, 0, &mut lost).unwrap();
        let revoke = Message::Revoke(1).to_frame(Mac([2; 6]));
        assert!(outbox.push_urgent(&revoke, 1));
        assert!(outbox.push_request(&Message::Close(2).to_frame(Mac([2; 6])), 2));
        let mut reader = Reader::new();
        let mut seen = Vec::new();
        while !outbox.is_empty() || seen.len() < 2 {
            let before = outbox.has_request(1);
            outbox.flush(&a, 0, &mut lost).unwrap();
            assert!(before || !outbox.has_request(1));
            assert_eq!(outbox.has_request(2), !outbox.is_empty());
            if reader.fill(&mut &b).is_err() {
                continue;
            }
            while let Some(frame) = reader.next_frame().unwrap() {
                if let Some((_, message)) = Message::parse(frame) {
                    seen.push((message, outbox.len()));
                }
            }
        }
        assert_eq!(seen[0].0, Message::Revoke(1));
        assert!(seen[0].1 > 1 << 21, "behind what was in the socket alone");
        assert_eq!(seen[1].0, Message::Close(2));
        assert!(outbox.asked.is_empty());
    }

    #[test]
    fn a_grant_is_read_when_its_descriptors_are_received() {
        use rustix::net::RecvFlags;
        let (a, b) = UnixStream::pair().unwrap();
        let mut outbox = Outbox::new(1 << 20);
        let mut lost = Vec::new();
        for number in 1..=3 {
            assert!(outbox.push_within(&[1; 1000], 1 << 20));
            grant(&mut outbox, number);
            outbox.flush(&a, number.into(), &mut lost).unwrap();
        }
        outbox.look(&a).unwrap();
        assert_eq!((outbox.unread_grants(), outbox.grants()), (3, 0));
        // It knows what is there, and has taken nothing.
        let mut buffer = [0; 1 << 16];
        rustix::net::recv(&b, &mut buffer[..], RecvFlags::PEEK).unwrap();
        outbox.look(&a).unwrap();
        assert_eq!(
            (outbox.unread_grants(), outbox.unread_since()),
            (3, Some(1))
        );
        let mut fds = VecDeque::new();
        let mut receiver = Receiver::new(&b, &mut fds);
        // All of the first grant, and what lies between.
        let mut bytes = 0;
        while bytes < 64 + 1004 {
            bytes += io::Read::read(&mut receiver, &mut buffer[..64 + 1004 - bytes]).unwrap();
        }
        outbox.look(&a).unwrap();
        assert!(outbox.unread_grants() >= 2);
        b.set_nonblocking(true).unwrap();
        while io::Read::read(&mut receiver, &mut buffer).is_ok() {}
        outbox.look(&a).unwrap();
        assert_eq!(outbox.unread_grants(), 0);
    }

    #[test]
    fn what_is_sent_stays_unread_when_nothing_more_is_written() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut outbox = Outbox::new(1 << 20);
        for number in 1..=3 {
            grant(&mut outbox, number);
        }
        outbox.flush(&a, 0, &mut Vec::new()).unwrap();
        // One that is not sent goes with its descriptors.
        grant(&mut outbox, 4);
        let mut unread = outbox.into_unread();
        a.shutdown(std::net::Shutdown::Both).unwrap();
        b.shutdown(std::net::Shutdown::Both).unwrap();
        unread.look(&a).unwrap();
        assert_eq!(unread.grants(), 3);
        let mut fds = VecDeque::new();
        io::Read::read(&mut Receiver::new(&b, &mut fds), &mut [0; 64]).unwrap();
        unread.look(&a).unwrap();
        assert!((1..=3).contains(&unread.grants()));
        drop(b);
        unread.look(&a).unwrap();
        assert_eq!(unread.grants(), 0);
    }

    #[test]
    fn grants_go_in_their_places_with_their_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        b.set_nonblocking(true).unwrap();
        let mut outbox = Outbox::new(1 << 20);
        for number in 1..=20u8 {
            // More than the socket takes at once.
            assert!(outbox.push_within(&[number; 16_000], 1 << 20));
            grant(&mut outbox, number.into());
        }
        let mut reader = Reader::new();
        let mut fds = VecDeque::new();
        let (mut lost, mut expected) = (Vec::new(), 1..=20u8);
        let mut turn = 0;
        while !outbox.is_empty() || turn < 2 {
            turn = if outbox.is_empty() { turn + 1 } else { 0 };
            outbox.flush(&a, 0, &mut lost).unwrap();
            while reader.fill(&mut Receiver::new(&b, &mut fds)).is_ok() {
                while let Some(frame) = reader.next_frame().unwrap() {
                    if let Some((_, message)) = Message::parse(frame) {
                        let Message::Revoke(id) = message else {
                            panic!("{message:?}")
                        };
                        for fd in fds.drain(..GRANT_FDS) {
                            assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, i64::from(id));
                        }
                    } else {
                        assert_eq!(Some(frame[0]), expected.next());
                    }
                }
            }
        }
        assert_eq!((lost, expected.next()), (vec![], None));
        assert!(fds.is_empty());
    }
}
